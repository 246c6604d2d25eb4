"""What the three served dialects make of an answer comes back as the very message that was delivered."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opengyre.core.chat import Message, ToolCall
from opengyre.core.errors import CallError, ContextOverflowError
from opengyre.core.types import Finish
from opengyre.proxy.dialects import COUNTERS, DIALECTS, anthropic, chat, gemini, responses, responses_compact
from opengyre.proxy.requests import Answer, AnswerChoice

SERVED = {"chat": chat, "anthropic": anthropic, "responses": responses}
TOOLS = {
    "chat": [
        {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("sh", "ask")
    ],
    "anthropic": [{"name": name, "input_schema": {"type": "object"}} for name in ("sh", "ask")],
    "responses": [{"type": "function", "name": name, "parameters": {"type": "object"}} for name in ("sh", "ask")],
}
IMAGE = "data:image/png;base64,AA=="
REPLIES = {
    "text": ("hello", "", ()),
    "edges of text": ("\n I'll start. \n\n", "", ()),
    "thought and text": ("done", "Let me think.\n\n", ()),
    "one call": ("", "", (("sh", '{"cmd":"ls"}'),)),
    "all, two calls": ("Looking.", " why \n", (("sh", '{"b":1,"a":"é<&>"}'), ("ask", '{"deep":{"x":[1,2.5,null]}}'))),
    "nothing": ("", "", ()),
    "only a thought": ("", "hm", ()),
    "no arguments": ("", "", (("sh", "{}"),)),
}


def body_with(name, history):
    """Return a request body: a user's word, then what is in the history."""
    ask = {"role": "user", "content": "go"}
    if name == "responses":
        return {"model": "m", "input": [ask, *history], "tools": TOOLS[name]}
    return {"model": "m", "max_tokens": 9, "messages": [ask, *history], "tools": TOOLS[name]}


def echo(name, body):
    """Return what a faithful client puts into its history for an answer."""
    if name == "chat":
        return [body["choices"][0]["message"]]
    if name == "anthropic":
        return [{"role": "assistant", "content": body["content"]}]
    return body["output"]


def aggregate(name, events):
    """Return the unstreamed body that the events of a stream add up to."""
    return {"chat": aggregate_chat, "anthropic": aggregate_anthropic, "responses": aggregate_responses}[name](events)


def aggregate_chat(events):
    message = {"role": "assistant", "content": "", "reasoning_content": "", "tool_calls": []}
    for _, chunk in events:
        for choice in chunk["choices"]:
            delta = choice["delta"]
            message["content"] += delta.get("content") or ""
            message["reasoning_content"] += delta.get("reasoning_content") or ""
            message["tool_calls"] += delta.get("tool_calls") or []
    return {"choices": [{"message": message}]}


def aggregate_anthropic(events):
    message, raw = {}, []
    for name, data in events:
        assert name == data["type"]
        if name == "message_start":
            message = data["message"]
        elif name == "content_block_start":
            assert data["index"] == len(message["content"])
            message["content"].append(data["content_block"])
        elif name == "content_block_delta":
            block, delta = message["content"][data["index"]], data["delta"]
            if delta["type"] == "input_json_delta":
                raw.append(delta["partial_json"])
            else:
                key = delta["type"].removesuffix("_delta")
                block[key] += delta[key]
        elif name == "message_delta":
            message |= data["delta"]
            message["usage"] = data["usage"]
    return {**message, "_raw_tool_args": raw}


def aggregate_responses(events):
    assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
    items = {}
    for name, data in events:
        assert name == data["type"]
        if name == "response.output_item.added":
            items[data["output_index"]] = json.loads(json.dumps(data["item"]))
        elif name.endswith("part.added"):
            item = items[data["output_index"]]
            item["summary" if item["type"] == "reasoning" else "content"].append(dict(data["part"]))
        elif name == "response.output_text.delta":
            items[data["output_index"]]["content"][data["content_index"]]["text"] += data["delta"]
        elif name == "response.reasoning_summary_text.delta":
            items[data["output_index"]]["summary"][data["summary_index"]]["text"] += data["delta"]
        elif name == "response.function_call_arguments.delta":
            items[data["output_index"]]["arguments"] += data["delta"]
        elif name == "response.output_item.done":
            built = items[data["output_index"]]
            assert {**built, "status": None} == {**data["item"], "status": None}
    return {"output": list(items.values())}


@pytest.mark.parametrize(("name", "kind"), list(itertools.product(SERVED, REPLIES)))
def test_an_answer_that_comes_back_is_the_message_that_was_delivered(made, name, kind):
    dialect, message = SERVED[name], made.reply(*REPLIES[kind])
    request = dialect.parse_request(body_with(name, []))
    body = json.loads(dialect.answer_body(request, made.answered(message)))
    again = dialect.parse_request(body_with(name, [*echo(name, body), *results(name, message)]))
    assert again.messages[1] == message
    assert again.messages[: len(request.messages)] == request.messages
    assert dialect.parse_response(body) == message


def results(name, message):
    """Return results of all calls, the last one first, and a user's word."""
    ids = [call.id for call in reversed(message.tool_calls)]
    if name == "chat":
        made = [{"role": "tool", "tool_call_id": each, "content": "ok"} for each in ids]
    elif name == "anthropic":
        blocks = [{"type": "tool_result", "tool_use_id": each, "content": "ok"} for each in ids]
        return [{"role": "user", "content": [*blocks, {"type": "text", "text": "more"}]}]
    else:
        made = [{"type": "function_call_output", "call_id": each, "output": "ok"} for each in ids]
    return [*made, {"role": "user", "content": "more"}]


@pytest.mark.parametrize("name", SERVED)
def test_three_dialects_read_one_history_alike(made, name):
    dialect, message = SERVED[name], made.reply(*REPLIES["all, two calls"])
    request = dialect.parse_request(body_with(name, []))
    body = json.loads(dialect.answer_body(request, made.answered(message)))
    again = dialect.parse_request(body_with(name, [*echo(name, body), *results(name, message)]))
    assert again.messages == (
        Message(role="user", content="go"),
        message,
        Message(role="tool", content="ok", tool_call_id="call_e_0001"),
        Message(role="tool", content="ok", tool_call_id="call_e_0000"),
        Message(role="user", content="more"),
    )
    assert [tool.name for tool in again.tools] == ["sh", "ask"]


@pytest.mark.parametrize(("name", "kind"), list(itertools.product(SERVED, REPLIES)))
def test_a_stream_adds_up_to_the_answer_that_is_not_streamed(made, name, kind):
    dialect, message = SERVED[name], made.reply(*REPLIES[kind])
    request = dialect.parse_request(body_with(name, []))
    answer = made.answered(message)
    summed = aggregate(name, made.events_of(dialect.stream_chunks(request, answer)))
    assert dialect.parse_response(summed) == message


@given(
    content=st.text(),
    reasoning=st.text(),
    arguments=st.lists(st.dictionaries(st.text(), st.integers() | st.text() | st.none(), max_size=3), max_size=3),
    name=st.sampled_from(list(SERVED)),
)
def test_any_answer_comes_back_equal(content, reasoning, arguments, name):
    calls = tuple(
        ToolCall(id=f"c{number}", name="sh", arguments=json.dumps(each, ensure_ascii=False, separators=(",", ":")))
        for number, each in enumerate(arguments)
    )
    message = Message(role="assistant", content=content, reasoning=reasoning, tool_calls=calls)
    choice = AnswerChoice(message=message, finish=Finish.STOP, completion_tokens=1)
    answer = Answer(answer_id="e", model="m", created_s=0, choices=(choice,), prompt_tokens=1)
    dialect = SERVED[name]
    request = dialect.parse_request(body_with(name, []))
    body = json.loads(dialect.answer_body(request, answer))
    (back,) = dialect.parse_request(body_with(name, echo(name, body))).messages[1:]
    assert (back.content, back.reasoning) == (content, reasoning)
    assert [(c.id, json.loads(c.arguments)) for c in back.tool_calls] == [
        (c.id, json.loads(c.arguments)) for c in calls
    ]


@pytest.mark.parametrize("name", SERVED)
@pytest.mark.parametrize("text", ['{"cmd": "unterminated', "", "[1]", "null", '{"a": 1,  "b" : "\\u00e9"}'])
def test_argument_text_goes_out_as_sampled_and_malformed_text_comes_back_raw(made, name, text):
    dialect, message = SERVED[name], made.reply("", "", (("sh", text),))
    request = dialect.parse_request(body_with(name, []))
    summed = aggregate(name, made.events_of(dialect.stream_chunks(request, made.answered(message))))
    assert dialect.parse_response(summed).tool_calls[0].arguments == text
    body = json.loads(dialect.answer_body(request, made.answered(message)))
    back = dialect.parse_request(body_with(name, echo(name, body))).messages[1].tool_calls[0].arguments
    assert back == text or json.loads(back) == json.loads(text)


@pytest.mark.parametrize("name", SERVED)
def test_an_image_is_refused_by_its_type(name):
    blocks = {
        "chat": {"type": "image_url", "image_url": {"url": IMAGE}},
        "anthropic": {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}},
        "responses": {"type": "input_image", "image_url": IMAGE},
    }
    history = [{"role": "user", "content": [blocks[name]]}]
    with pytest.raises(CallError, match=rf"{blocks[name]['type']}.*reads text only"):
        SERVED[name].parse_request(body_with(name, history))


CHOICES = [
    ("chat", "none", "none", False),
    ("chat", "required", "required", True),
    ("chat", {"type": "function", "function": {"name": "sh"}}, "sh", True),
    ("anthropic", {"type": "auto", "disable_parallel_tool_use": True}, "auto", False),
    ("anthropic", {"type": "none"}, "none", False),
    ("anthropic", {"type": "any"}, "required", True),
    ("anthropic", {"type": "tool", "name": "sh"}, "sh", True),
    ("responses", "auto", "auto", False),
    ("responses", "none", "none", False),
    ("responses", {"type": "function", "name": "sh"}, "sh", True),
    ("responses", {"type": "allowed_tools", "mode": "auto", "tools": []}, "auto", False),
]


@pytest.mark.parametrize(("name", "choice", "read", "is_cut"), CHOICES)
def test_a_forced_tool_cuts_the_law_down_and_none_offers_no_tool(name, choice, read, is_cut):
    request = SERVED[name].parse_request({**body_with(name, []), "tool_choice": choice})
    assert (request.tool_choice, request.truncated_law) == (read, is_cut)
    assert bool(request.tools) is (read != "none")


SCHEMAS = {
    "chat": {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}},
    "anthropic": {"output_config": {"format": {"type": "json_schema", "schema": {}}}},
    "responses": {"text": {"format": {"type": "json_schema", "name": "x", "schema": {}}}},
}


@pytest.mark.parametrize("name", SERVED)
def test_a_schema_for_the_answer_cuts_the_law_down(name):
    assert SERVED[name].parse_request({**body_with(name, []), **SCHEMAS[name]}).truncated_law


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("chat", {"stream": True, "max_completion_tokens": 5, "stream_options": {"include_usage": True}}),
        ("anthropic", {"stream": True, "max_tokens": 5}),
        ("responses", {"stream": True, "max_output_tokens": 5}),
    ],
)
def test_a_retry_with_another_limit_or_without_stream_has_the_same_hash(name, changes):
    parse = SERVED[name].parse_request
    first, second = parse(body_with(name, [])), parse({**body_with(name, []), **changes})
    assert first.body_hash == second.body_hash
    assert (second.stream, second.max_tokens) == (True, 5)
    assert parse({**body_with(name, []), "model": "other"}).body_hash != first.body_hash


FINISHES = [
    ("chat", Finish.LENGTH, lambda body: body["choices"][0]["finish_reason"], "length"),
    ("anthropic", Finish.LENGTH, lambda body: body["stop_reason"], "max_tokens"),
    ("responses", Finish.LENGTH, lambda body: body["incomplete_details"]["reason"], "max_output_tokens"),
    ("chat", Finish.STOP, lambda body: body["choices"][0]["finish_reason"], "stop"),
    ("anthropic", Finish.STOP, lambda body: body["stop_reason"], "end_turn"),
    ("responses", Finish.STOP, lambda body: body["status"], "completed"),
]


@pytest.mark.parametrize(("name", "finish", "read", "expected"), FINISHES)
def test_the_end_of_an_answer_is_told_in_the_words_of_the_protocol(made, name, finish, read, expected):
    dialect = SERVED[name]
    answer = made.answered(made.reply("cut"), finish=finish)
    assert read(json.loads(dialect.answer_body(dialect.parse_request(body_with(name, [])), answer))) == expected


OVERFLOWS = {
    "chat": ("context_length_exceeded", "maximum context length is 640 tokens"),
    "anthropic": ("invalid_request_error", "prompt is too long: 700 tokens > 640 maximum"),
    "responses": ("context_length_exceeded", "exceeds the context window"),
}


@pytest.mark.parametrize("name", SERVED)
def test_a_prompt_that_does_not_fit_is_refused_in_the_words_of_the_protocol(name):
    error = json.loads(SERVED[name].error_body(ContextOverflowError(700, 640)))["error"]
    kind, text = OVERFLOWS[name]
    assert kind in (error.get("code"), error["type"])
    assert text in error["message"]


def test_a_streaming_responses_client_learns_of_an_overflow_by_a_failed_event(made):
    events = made.events_of([responses.stream_error(ContextOverflowError(700, 640))])
    assert events[-1][0] == "response.failed"
    assert events[-1][1]["response"]["error"]["code"] == "context_length_exceeded"
    assert responses.stream_error(CallError("no")) is None


# -- Anthropic ------------------------------------------------------------------------------------------------


def test_tool_results_and_text_of_one_user_message_stay_in_order():
    blocks = [
        {"type": "text", "text": "a"},
        {"type": "tool_result", "tool_use_id": "2", "content": [{"type": "text", "text": "x"}]},
        {"type": "tool_result", "tool_use_id": "1", "content": "y", "is_error": True},
        {"type": "text", "text": "b", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "c"},
    ]
    messages = anthropic.parse_request(body_with("anthropic", [{"role": "user", "content": blocks}])).messages
    assert [(m.role, m.content, m.tool_call_id) for m in messages[1:]] == [
        ("user", "a", ""),
        ("tool", "x", "2"),
        ("tool", "y", "1"),
        ("user", "b\nc", ""),
    ]


def test_a_system_text_is_read_from_a_text_or_from_blocks():
    body = body_with("anthropic", [])
    blocks = [{"type": "text", "text": "one", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "two"}]
    assert anthropic.parse_request({**body, "system": blocks}).messages[0].content == "one\ntwo"
    assert anthropic.parse_request({**body, "system": "one"}).messages[0] == Message(role="system", content="one")


def test_a_stop_sequence_is_reported_by_its_text(made):
    request = anthropic.parse_request({**body_with("anthropic", []), "stop_sequences": ["END"]})
    assert request.stop == ("END",)
    body = json.loads(anthropic.answer_body(request, made.answered(made.reply("x"), stop_sequence="END")))
    assert (body["stop_reason"], body["stop_sequence"]) == ("stop_sequence", "END")


def test_tools_that_a_vendor_runs_are_left_out():
    tools = [{"type": "web_search_20250305", "name": "web_search"}, {"type": "bash_20250124", "name": "bash"}]
    request = anthropic.parse_request({**body_with("anthropic", []), "tools": tools})
    assert [tool.name for tool in request.tools] == ["bash"]


# -- Responses ------------------------------------------------------------------------------------------------

CODEX_TOOLS = [
    {
        "type": "custom",
        "name": "apply_patch",
        "format": {"type": "grammar", "syntax": "lark", "definition": "start: x"},
    },
    {"type": "local_shell"},
    {"type": "namespace", "name": "agents", "tools": [{"type": "function", "name": "spawn", "parameters": {}}]},
    {"type": "namespace", "name": "other", "tools": [{"type": "function", "name": "spawn", "parameters": {}}]},
    {"type": "web_search", "external_web_access": True},
]
CODEX_CALLS = [
    ("apply_patch", '{"input":"*** Begin"}', "custom_tool_call"),
    ("local_shell", '{"command":["ls","-l"],"timeout_ms":5}', "local_shell_call"),
    ("spawn", '{"prompt":"x"}', "function_call"),
    ("other__spawn", '{"prompt":"y"}', "function_call"),
]


@pytest.mark.parametrize(("tool", "arguments", "kind"), CODEX_CALLS)
def test_a_call_of_a_special_tool_of_codex_comes_back_equal(made, tool, arguments, kind):
    body = {"model": "m", "input": "go", "tools": CODEX_TOOLS}
    request = responses.parse_request(body)
    assert [each.name for each in request.tools] == [name for name, _, _ in CODEX_CALLS]
    message = made.reply("now", "why", ((tool, arguments),))
    answer = made.answered(message)
    sent = json.loads(responses.answer_body(request, answer))
    assert sent["output"][-1]["type"] == kind
    again = responses.parse_request({**body, "input": [{"role": "user", "content": "go"}, *sent["output"]]})
    assert again.messages[1] == message
    events = made.events_of(responses.stream_chunks(request, answer))
    assert events[-1] == (
        "response.completed",
        {"type": "response.completed", "sequence_number": len(events) - 1, "response": sent},
    )


def test_a_call_in_a_namespace_names_it_on_the_wire(made):
    request = responses.parse_request({"input": "go", "tools": CODEX_TOOLS})
    message = made.reply("", "", (("other__spawn", "{}"),))
    (item,) = json.loads(responses.answer_body(request, made.answered(message)))["output"]
    assert (item["name"], item["namespace"]) == ("spawn", "other")


def test_a_thought_comes_back_exactly_from_its_sealed_text_alone(made):
    request = responses.parse_request({"input": "go"})
    sent = json.loads(responses.answer_body(request, made.answered(made.reply("x", " a thought \n"))))
    thought = {**sent["output"][0], "summary": [], "content": None}
    back = responses.parse_request({"input": [{"role": "user", "content": "go"}, thought, sent["output"][1]]})
    assert back.messages[1].reasoning == " a thought \n"


def test_what_relies_on_stored_responses_is_refused():
    with pytest.raises(CallError, match="previous_response_id: this proxy stores no responses"):
        responses.parse_request({"input": "go", "previous_response_id": "resp_1"})
    with pytest.raises(CallError, match="item of type 'item_reference'"):
        responses.parse_request({"input": [{"type": "item_reference", "id": "msg_1"}]})


def test_a_compaction_answers_with_the_users_messages_and_a_summary_that_comes_back(made):
    history = [*echo("responses", {"output": []}), {"role": "user", "content": "more"}]
    request = responses_compact.parse_request(body_with("responses", history))
    assert request.is_compaction
    assert [message.content for message in request.messages[:-1]] == ["go", "more"]
    body = json.loads(responses_compact.answer_body(request, made.answered(made.reply("all is well"))))
    assert body["object"] == "response.compaction"
    again = responses.parse_request({"input": body["output"]})
    assert [message.role for message in again.messages] == ["user", "user", "user"]
    assert again.messages[-1].content.endswith("all is well")
    assert responses_compact.parse_response(body).content.endswith("all is well")


def test_a_compaction_trigger_among_the_items_asks_for_a_compaction_item(made):
    request = responses.parse_request({"input": [{"role": "user", "content": "go"}, {"type": "compaction_trigger"}]})
    assert request.is_compaction
    (item,) = json.loads(responses.answer_body(request, made.answered(made.reply("s"))))["output"]
    assert item["type"] == "compaction"


# -- chat and Gemini ------------------------------------------------------------------------------------------


def test_chat_choices_and_stops_are_read_and_every_choice_is_answered(made):
    request = chat.parse_request({**body_with("chat", []), "n": 2, "stop": "END"})
    assert (request.choices, request.stop, request.truncated_law) == (2, ("END",), False)
    body = json.loads(chat.answer_body(request, made.answered(made.reply("a"), made.reply("b"))))
    assert [(c["index"], c["message"]["content"]) for c in body["choices"]] == [(0, "a"), (1, "b")]
    assert body["usage"]["completion_tokens"] == 14


def test_gemini_thoughts_calls_and_results_are_read():
    parts = [{"text": "hm", "thought": True}, {"text": "go"}, {"functionCall": {"name": "f", "args": {"a": 1}}}]
    result = {"functionResponse": {"name": "f", "id": "made-up", "response": {"output": "ok"}}}
    body = {
        "contents": [
            {"parts": [{"text": "hi"}]},
            {"role": "model", "parts": parts},
            {"role": "user", "parts": [result]},
        ],
        "generationConfig": {"maxOutputTokens": 5, "stopSequences": ["END"]},
        "tools": [{"functionDeclarations": [{"name": "f", "parametersJsonSchema": {"type": "object"}}]}],
    }
    request = gemini.parse_request(body)
    assert request.messages[1] == gemini.parse_response({"candidates": [{"content": {"parts": parts}}]})
    assert request.messages[1].tool_calls == (ToolCall(id="f_0", name="f", arguments='{"a":1}'),)
    assert request.messages[2] == Message(role="tool", content="ok", tool_call_id="f_0", name="f")
    assert (request.max_tokens, request.stop, request.tools[0].name) == (5, ("END",), "f")


def test_every_served_path_has_a_dialect():
    assert set(DIALECTS) == {"/v1/chat/completions", "/v1/responses", "/v1/responses/compact", "/v1/messages"}
    assert set(COUNTERS) == {"/v1/messages/count_tokens", "/v1/responses/input_tokens"}
