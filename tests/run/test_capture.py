"""A harness against a real proxy as model server through ``opengyre capture``; what is written can be replayed."""

import asyncio
import json
import sys
import time

import pytest

from opengyre.cli import main
from opengyre.core.chat import Message, ToolCall
from opengyre.ledger.ledger import Ledger
from opengyre.model.text_chat import ByteRenderer
from opengyre.proxy.server import Proxy
from opengyre.proxy.session import SessionSpec
from opengyre.run.captures import read_capture
from opengyre.run.replay import ScriptedEngine

KEY = "sk-0123456789abcdef"
SAID = Message(
    role="assistant",
    content="I look, für alle.",
    reasoning="hm",
    tool_calls=tuple(ToolCall(id="", name="sh", arguments=text) for text in ('{"c": "ls"}', '{"c":"pwd"}')),
)
HARNESS = """
import json, os, sys, urllib.request
path, is_streamed = sys.argv[1], sys.argv[2] == "yes"
base = os.environ["OPENAI_BASE_URL"].removesuffix("/v1")
asked = "input" if "responses" in path else "messages"
body = {"model": "m", "max_tokens": 99, "metadata": {"user_id": "device-77"}, "stream": is_streamed,
        asked: [{"role": "user", "content": "hello " + os.path.expanduser("~")}]}
headers = {"content-type": "application/json", "authorization": "Bearer sk-0123456789abcdef", "x-device-id": "d"}
for _ in range(2):
    request = urllib.request.Request(base + path, json.dumps(body).encode(), headers)
    urllib.request.urlopen(request).read()
"""


@pytest.fixture
async def upstream(tmp_path):
    engine = ScriptedEngine(ByteRenderer(), SAID)
    ledger = Ledger.open(tmp_path)
    proxy = Proxy(engine=engine, store=ledger, renderer=engine.renderer, clock=time.monotonic)
    await proxy.start()
    who = {"execution_id": "e", "group_id": 0, "slot": 0, "attempt": 0, "run_seed": 0, "context_tokens": 1 << 20}
    proxy.open_keyed(SessionSpec(**who), KEY)
    yield f"http://127.0.0.1:{await proxy.listen()}/v1"
    await proxy.stop()
    ledger.close()


async def captured(upstream, folder, *words):
    out = folder / "capture.jsonl"
    command = [sys.executable, "-c", HARNESS, *words]
    code = await asyncio.to_thread(main, ["capture", "--upstream", upstream, "--out", str(out), "--", *command])
    return code, out


@pytest.mark.parametrize("streamed", ["yes", "no"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
async def test_what_a_harness_asks_is_recorded_and_replays(upstream, tmp_path, monkeypatch, path, streamed):
    monkeypatch.setenv("HOME", "/tmp/ann/home")
    code, out = await captured(upstream, tmp_path, path, streamed)
    assert code == 0
    calls = read_capture(out)
    assert [(call.n, call.path, call.status, call.fault) for call in calls] == [
        (1, path, 200, None),
        (2, path, 200, None),
    ]
    for secret in (KEY, "device-77", "/tmp/ann", "x-device-id"):
        assert secret not in out.read_text()
    assert "hello /home-of-user" in out.read_text()
    assert await asyncio.to_thread(main, ["replay", str(out), "--json"]) == 0
    line = json.loads(out.read_text().splitlines()[0])
    assert "f\u00fcr alle" in json.dumps(line["response"], ensure_ascii=False)
    if path.endswith("messages"):
        assert [block["input"] for block in line["response"]["content"][-2:]] == [{"c": "ls"}, {"c": "pwd"}]


async def test_an_error_of_the_server_is_passed_on_and_recorded(upstream, tmp_path):
    code, out = await captured(upstream.replace("/v1", ""), tmp_path, "/v1/messages?beta=true", "no")
    assert code == 0
    assert json.loads(out.read_text().splitlines()[0])["query"] == "beta=true"
    missing = "http://127.0.0.1:9"
    code, out = await captured(missing, tmp_path, "/v1/messages", "no")
    assert (code, out.read_text()) == (1, "")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--upstream", "ftp://x", "--", "true"], "expected a URL"),
        (["--upstream", "http://127.0.0.1:1"], "no command"),
        (["--upstream", "http://127.0.0.1:1", "--", "/nonexistent/harness"], "cannot be started"),
        (["--upstream", "http://127.0.0.1:1", "--out", "/nonexistent/x", "--", "true"], "cannot be written"),
    ],
)
def test_wrong_input_is_one_line(words, expected, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["capture", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert expected in line
