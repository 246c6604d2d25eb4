"""The demonstrations speak exactly as the reference harness does: the real agent against the scripted expert."""

import json
import random
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import msgspec
import pytest

from gyre_agent.agent import Agent
from gyre_agent.client import ModelClient
from gyre_agent.workspace import Workspace
from opengyre.core.chat import Message, Tool
from opengyre.model.chat import EmbeddedRenderer
from opengyre.proxy.dialects.chat import parse_request
from opengyre.tasks.minirepo.demonstrations import Demonstration, Noise
from opengyre.tasks.minirepo.family import is_held_out, make_package
from opengyre.tasks.minirepo.tasks import minirepo_package, minirepo_task
from opengyre.tasks.minirepo.tasks import test_file as visible_file
from opengyre.tasks.minirepo.vocabulary import train_tokenizer

RENDERER = EmbeddedRenderer(train_tokenizer(836))


def plain(messages: tuple[Message, ...]) -> list[Message]:
    """Return messages without tool-call ids: the demonstrations have none."""
    replace = msgspec.structs.replace
    return [
        replace(
            m,
            tool_call_id="",
            tool_calls=tuple(replace(c, id="", arguments=_sorted(c.arguments)) for c in m.tool_calls),
        )
        for m in messages
    ]


def _sorted(arguments: str) -> str:
    return json.dumps(json.loads(arguments), sort_keys=True)


class Script(ThreadingHTTPServer):
    """Answers each request with the reply of the demonstration that was asked with the same messages."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, demonstration: list) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.known = [
            (plain(messages), tools, reply)
            for context in demonstration
            for (messages, tools), reply in zip(context.requests, context.replies, strict=True)
        ]
        self.asked = 0
        self.unknown: list[list[Message]] = []


class Handler(BaseHTTPRequestHandler):
    server: Script
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def do_POST(self) -> None:
        request = parse_request(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        asked = plain(request.messages)
        self.server.asked += 1
        for place, (messages, tools, reply) in enumerate(self.server.known):
            if messages == asked and [tool.name for tool in tools] == [tool.name for tool in request.tools]:
                del self.server.known[place]
                self.answer(200, self.body(messages, tools, reply))
                return
        self.server.unknown.append(asked)
        self.answer(400, {"error": {"message": "not in the demonstration"}})

    def body(self, messages: list[Message], tools: tuple[Tool, ...], reply: Message) -> dict:
        calls = [
            {"id": f"c{self.server.asked}", "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
            for c in reply.tool_calls
        ]
        prompt, completion = len(RENDERER.render(messages, tools)), len(RENDERER.encode_reply(reply, tools))
        message = {"role": "assistant", "content": reply.content or None, **({"tool_calls": calls} if calls else {})}
        return {
            "choices": [{"message": message}],
            "usage": {"prompt_tokens": prompt, "completion_tokens": completion},
        }

    def answer(self, status: int, body: dict) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.mark.parametrize("seed", range(12))
def test_the_real_agent_sends_exactly_the_requests_of_the_demonstration(tmp_path, seed):
    package = make_package(random.Random(seed), held_out=False)
    noise = Noise(early_finish=0.0, skipped_module=0.0) if seed % 2 else Noise()
    expert = Demonstration(package, RENDERER, random.Random(seed), noise)
    contexts = expert.run()
    (tmp_path / "TASK.md").write_text(package.instruction())
    for module, functions in package.modules:
        (tmp_path / f"test_{module}.py").write_text(visible_file(module, functions, expert.visible))
    server = Script(contexts)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    agent = Agent(ModelClient(f"http://127.0.0.1:{server.server_port}/v1"), Workspace(str(tmp_path)))
    agent.run()
    server.shutdown()
    server.server_close()
    assert server.unknown == []
    assert server.known == []
    assert agent.calls == sum(len(context.replies) for context in contexts)


def test_some_demonstrations_compact_and_some_retry():
    made = [
        Demonstration(make_package(random.Random(seed), held_out=False), RENDERER, random.Random(seed), Noise()).run()
        for seed in range(40)
    ]
    leads = [sum(context.is_lead for context in contexts) for contexts in made]
    assert max(leads) > 1
    texts = [RENDERER.text_of(context.tokens) for contexts in made for context in contexts]
    assert any("append_file<arg>" in text.split("<asst>", 1)[1] for text in texts)
    assert any("failed " in text for text in texts)


def test_held_out_tasks_share_no_triple_with_training_tasks():
    for split, held_out in (("train", False), ("heldout", True)):
        for index in range(100):
            for _, functions in minirepo_package(split, index).modules:
                assert all(is_held_out(f.steps, f.result) == held_out for f in functions)


def test_a_task_is_the_same_wherever_it_is_made_and_hides_its_inputs():
    for index in range(20):
        task = minirepo_task("train", index)
        assert task == minirepo_task("train", index)
        assert len(set(task.test_ids)) == len(task.test_ids)
        for name, hidden in task.hidden_files.items():
            visible = task.files["test_" + name.removeprefix("hidden_")]
            asked = [line for line in hidden.splitlines() if "assert" in line]
            assert not set(asked) & set(visible.splitlines())
            assert len(asked) == 8 * hidden.count("def test_")
