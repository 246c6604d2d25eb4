"""Reads recorded harness sessions: four dialects to messages, so that roles and matching can be checked on them."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from opengyre.core.chat import Message, Tool, ToolCall
from opengyre.core.types import Role

CAPTURES = Path(__file__).parents[3] / "shared" / "captures"


@dataclass
class Request:
    number: int
    path: str
    headers: dict
    body: dict
    messages: list
    tools: list
    reply: Message | None
    is_fault: bool
    is_hung_up: bool
    truth: Role


def text_of(content):
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    return "\n".join(str(part.get("text", "")) for part in content if "text" in part)


def chat_message(raw):
    calls = tuple(
        ToolCall(id=call["id"], name=call["function"]["name"], arguments=call["function"]["arguments"])
        for call in raw.get("tool_calls") or ()
    )
    return Message(
        role=raw["role"],
        content=text_of(raw.get("content")),
        reasoning=raw.get("reasoning_content") or "",
        tool_calls=calls,
        tool_call_id=raw.get("tool_call_id") or "",
    )


def read_chat(body, response):
    tools = [Tool(name=tool["function"]["name"]) for tool in body.get("tools") or ()]
    reply = chat_message(response["choices"][0]["message"]) if response and response.get("choices") else None
    return [chat_message(message) for message in body["messages"]], tools, reply


def anthropic_messages(raw):
    role, content = raw["role"], raw["content"]
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    out, texts, calls, thoughts = [], [], [], []
    for part in parts:
        if part["type"] == "tool_result":
            result = Message(role="tool", content=text_of(part.get("content")), tool_call_id=part["tool_use_id"])
            out.append(result)
        elif part["type"] == "tool_use":
            calls.append(ToolCall(id=part["id"], name=part["name"], arguments=json.dumps(part["input"])))
        elif part["type"] == "thinking":
            thoughts.append(part["thinking"])
        elif part["type"] == "text":
            texts.append(part["text"])
    if texts or calls or thoughts:
        text = "\n".join(texts)
        out.append(Message(role=role, content=text, reasoning="\n".join(thoughts), tool_calls=tuple(calls)))
    return out


def read_anthropic(body, response):
    system = body.get("system") or []
    parts = [system] if isinstance(system, str) else [part["text"] for part in system]
    text = "\n".join(part for part in parts if not part.startswith("x-anthropic-billing-header"))
    messages = [Message(role="system", content=text)]
    for raw in body["messages"]:
        messages += anthropic_messages(raw)
    tools = [Tool(name=tool["name"]) for tool in body.get("tools") or ()]
    reply = None
    if response and response.get("content"):
        raw_arguments = iter(response.get("_raw_tool_args") or ())
        reply = anthropic_messages(response)[0]
        calls = [ToolCall(id=c.id, name=c.name, arguments=next(raw_arguments, c.arguments)) for c in reply.tool_calls]
        reply = Message(role="assistant", content=reply.content, reasoning=reply.reasoning, tool_calls=tuple(calls))
    return messages, tools, reply


def responses_items(items):
    out = []
    for item in items:
        kind = item.get("type", "message")
        if kind == "message":
            out.append(Message(role=item["role"], content=text_of(item["content"])))
        elif kind == "function_call_output":
            output = item["output"]
            text = output if isinstance(output, str) else text_of(output)
            out.append(Message(role="tool", content=text, tool_call_id=item["call_id"]))
        elif kind == "function_call":
            call = ToolCall(id=item["call_id"], name=item["name"], arguments=item["arguments"])
            out.append(Message(role="assistant", tool_calls=(call,)))
        elif kind == "reasoning":
            thought = "".join(part["text"] for part in item.get("summary") or ())
            out.append(Message(role="assistant", reasoning=thought))
    return merged_assistants(out)


def merged_assistants(messages):
    """Join the items of one answer: the protocol lists thought, text and calls one by one."""
    out = []
    for message in messages:
        last = out[-1] if out else None
        if message.role == "assistant" and last is not None and last.role == "assistant":
            out[-1] = Message(
                role="assistant",
                content=last.content + message.content,
                reasoning=last.reasoning + message.reasoning,
                tool_calls=last.tool_calls + message.tool_calls,
            )
        else:
            out.append(message)
    return out


def read_responses(body, response):
    items = body["input"]
    messages = responses_items([{"role": "user", "content": items}] if isinstance(items, str) else items)
    if body.get("instructions"):
        messages = [Message(role="system", content=body["instructions"]), *messages]
    tools = [Tool(name=tool.get("name", tool["type"])) for tool in body.get("tools") or ()]
    made = responses_items(response["output"]) if response and response.get("output") else []
    return messages, tools, made[0] if made else None


def gemini_messages(raw):
    out, texts, calls = [], [], []
    for part in raw["parts"]:
        if "functionResponse" in part:
            answer = part["functionResponse"]
            out.append(Message(role="tool", content=json.dumps(answer["response"]), name=answer["name"]))
        elif "functionCall" in part:
            call = part["functionCall"]
            calls.append(ToolCall(id=call.get("id", ""), name=call["name"], arguments=json.dumps(call["args"])))
        elif "text" in part and not part.get("thought"):
            texts.append(part["text"])
    thoughts = [part["text"] for part in raw["parts"] if part.get("thought")]
    if texts or calls or thoughts:
        role = "assistant" if raw["role"] == "model" else "user"
        reasoning = "\n".join(thoughts)
        out.append(Message(role=role, content="\n".join(texts), reasoning=reasoning, tool_calls=tuple(calls)))
    return out


def read_gemini(body, response):
    system = body.get("systemInstruction", {}).get("parts", [])
    messages = [Message(role="system", content=text_of(system))]
    for raw in body["contents"]:
        messages += gemini_messages(raw)
    tools = [
        Tool(name=each["name"]) for group in body.get("tools") or () for each in group.get("functionDeclarations", [])
    ]
    reply = None
    if response and response.get("candidates"):
        reply = gemini_messages(response["candidates"][0]["content"])[0]
    return messages, tools, reply


READERS = {"chat": read_chat, "anthropic": read_anthropic, "responses": read_responses, "gemini": read_gemini}


def truth_of(raw):
    if raw["mock_kind"] == "title":
        return Role.AUXILIARY
    is_main, is_summary = raw["mock_role"] == "main", raw["mock_kind"] == "compact"
    if is_main:
        return Role.MAIN_SUMMARY if is_summary else Role.MAIN
    return Role.SUB_AGENT_SUMMARY if is_summary else Role.SUB_AGENT


def read_session(path):
    requests = []
    for line in path.read_text().splitlines():
        raw = json.loads(line)
        messages, tools, reply = READERS[raw["protocol"]](raw["request"], raw["response"])
        requests.append(
            Request(
                number=raw["n"],
                path=raw["path"],
                headers=raw["headers"],
                body=raw["request"],
                messages=messages,
                tools=tools,
                reply=reply if raw["status"] == 200 else None,
                is_fault=raw["mock_role"] == "?",
                is_hung_up=bool(raw.get("fault")),
                truth=truth_of(raw),
            )
        )
    return requests


def session_names():
    return sorted(f"{path.parent.name}/{path.stem}" for path in CAPTURES.glob("*/*.jsonl"))


@pytest.fixture
def session():
    """Read a recorded session, or skip where the recordings are absent."""

    def read(name):
        path = CAPTURES / f"{name}.jsonl"
        if not path.exists():
            pytest.skip(f"{path} is absent")
        return read_session(path)

    return read


def pytest_generate_tests(metafunc):
    if "session_name" in metafunc.fixturenames:
        metafunc.parametrize("session_name", session_names() or ["absent"])
