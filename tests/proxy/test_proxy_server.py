"""The proxy over real unix sockets with a scripted engine and a real ledger."""

import asyncio
import json
from collections.abc import Callable

import aiohttp
import numpy as np
import pytest

from opengyre.core.protocols import GenerateRequest, Generation
from opengyre.core.types import Delivered, Finish, Role, SamplingLaw, Verdict, VersionRun
from opengyre.execute.harness import load_harness
from opengyre.ledger.ledger import Ledger
from opengyre.model.chat import EmbeddedRenderer
from opengyre.model.tokenizer import EmbeddedTokenizer
from opengyre.proxy.doors import DoorLimits
from opengyre.proxy.server import Proxy
from opengyre.proxy.session import SessionSpec
from opengyre.trajectory.marks import RoleMarks
from opengyre.trajectory.recorded import contexts_of

TOKENIZER = EmbeddedTokenizer.train(["write amber done"], words=("write", "amber", "done"), vocabulary=300)
RENDERER = EmbeddedRenderer(TOKENIZER)
MARKS = load_harness("gyre-agent").roles
TOOLS = [
    {
        "type": "function",
        "function": {"name": "write", "parameters": {"type": "object", "properties": {"module": {"type": "string"}}}},
    }
]


class ScriptedEngine:
    """Answers every call with the tokens that a function of its context gives."""

    def __init__(self, answer: Callable[[GenerateRequest], list[int]]) -> None:
        self.answer = answer
        self.requests: list[GenerateRequest] = []
        self.delay_s = 0.0

    async def generate(self, request: GenerateRequest) -> Generation:
        self.requests.append(request)
        await asyncio.sleep(self.delay_s)
        output = np.array(self.answer(request), np.int32)
        return Generation(
            output=output,
            behaviour_logprobs=np.full(len(output), -0.5, np.float32),
            versions=(VersionRun(0, len(output)),),
            finish=Finish.STOP,
        )


def write_amber(_: GenerateRequest) -> list[int]:
    return [
        *TOKENIZER.encode("write"),
        TOKENIZER.special("<arg>"),
        *TOKENIZER.encode("amber"),
        TOKENIZER.special("<end>"),
    ]


def say_done(_: GenerateRequest) -> list[int]:
    return [*TOKENIZER.encode("done"), TOKENIZER.special("<end>")]


class Served:
    def __init__(self, tmp_path) -> None:
        self.folder = tmp_path
        self.engine = ScriptedEngine(say_done)
        self.ledger = Ledger.open(tmp_path)
        self.proxy = Proxy(engine=self.engine, store=self.ledger, renderer=RENDERER, clock=lambda: 1.0)
        self.clients: list[aiohttp.ClientSession] = []

    async def open(self, name: str = "e", **changes: object) -> aiohttp.ClientSession:
        spec = SessionSpec(
            execution_id=name,
            group_id=0,
            slot=0,
            attempt=0,
            run_seed=0,
            **{"context_tokens": 200, "marks": MARKS, **changes},
        )
        await self.proxy.open_execution(spec, self.folder / name)
        client = aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(self.folder / name)))
        self.clients.append(client)
        return client


@pytest.fixture
async def served(tmp_path_factory):
    made = Served(tmp_path_factory.mktemp("p"))
    await made.proxy.start()
    yield made
    for client in made.clients:
        await client.close()
    await made.proxy.stop()
    made.ledger.close()


async def ask(client: aiohttp.ClientSession, messages: list[dict], headers: dict | None = None, **more: object):
    body = {"model": "m", "messages": messages, **more}
    async with client.post("http://proxy/v1/chat/completions", json=body, headers=headers) as response:
        return response.status, await response.json()


USER = {"role": "user", "content": "hello"}


async def test_a_call_is_committed_before_it_is_answered_and_usage_is_the_true_count(served):
    client = await served.open()
    status, body = await ask(client, [USER])
    assert status == 200
    (call,) = served.ledger.read_calls("e")
    assert body["choices"][0]["message"]["content"] == "done"
    assert body["usage"]["prompt_tokens"] == call.context_tokens == len(call.tail)
    assert body["usage"]["completion_tokens"] == len(call.output) == 2


async def test_a_history_that_comes_back_is_restored_from_its_recorded_tokens(served):
    served.engine.answer = write_amber
    client = await served.open()
    _, body = await ask(client, [USER], tools=TOOLS)
    message = body["choices"][0]["message"]
    call_id = message["tool_calls"][0]["id"]
    message["tool_calls"][0]["function"]["arguments"] = '{ "module" :  "amber" }'
    result = {"role": "tool", "tool_call_id": call_id, "content": "saved"}
    await ask(client, [USER, message, result], tools=TOOLS)
    first, second = served.ledger.read_calls("e")
    assert second.verdict is Verdict.RESTORED
    assert second.parent_call_id == first.call_id
    whole = list(contexts_of([first, second]))
    assert whole[1][: second.shared].tolist() == [*whole[0].tolist(), *first.output.tolist()]
    assert served.engine.requests[1].context.tolist() == whole[1].tolist()


async def test_a_request_id_that_was_committed_gets_the_same_answer_without_sampling(served):
    client = await served.open()
    headers = {"x-gyre-request-id": "r7"}
    first = await ask(client, [USER], headers)
    second = await ask(client, [USER], headers)
    assert first == second
    assert len(served.engine.requests) == 1


async def test_a_request_id_that_is_running_joins_the_running_call(served):
    served.engine.delay_s = 0.1
    client = await served.open()
    headers = {"x-gyre-request-id": "r8"}
    first, second = await asyncio.gather(ask(client, [USER], headers), ask(client, [USER], headers))
    assert first == second
    assert len(served.engine.requests) == 1


async def test_equal_requests_with_other_ids_are_second_samples_with_other_seeds(served):
    client = await served.open()
    await ask(client, [USER])
    await ask(client, [USER])
    seeds = [request.seed for request in served.engine.requests]
    assert len(set(seeds)) == 2


async def test_seeds_do_not_depend_on_the_order_of_other_agents(served):
    one, other = {"X-Gyre-Agent": "main"}, {"X-Gyre-Agent": "sub-1", "X-Gyre-Parent": "main"}
    first = await served.open("a")
    await ask(first, [USER], one)
    await ask(first, [USER], other)
    second = await served.open("b")
    await ask(second, [USER], other)
    await ask(second, [USER], one)
    seeds = [request.seed for request in served.engine.requests]
    assert seeds[:2] == seeds[:1:-1]


async def test_a_stream_has_the_answer_the_usage_chunk_and_the_end_mark(served):
    served.engine.answer = write_amber
    client = await served.open()
    body = {"messages": [USER], "tools": TOOLS, "stream": True, "stream_options": {"include_usage": True}}
    async with client.post("http://proxy/v1/chat/completions", json=body) as response:
        lines = [line for line in (await response.text()).split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    calls = [c["delta"]["tool_calls"][0] for chunk in chunks for c in chunk["choices"] if "tool_calls" in c["delta"]]
    assert calls[0]["function"] == {"name": "write", "arguments": '{"module":"amber"}'}
    assert chunks[-2]["choices"][0]["finish_reason"] == "tool_calls"
    assert chunks[-1]["usage"]["completion_tokens"] == 4


async def test_limits_are_clamped_and_only_a_prompt_that_does_not_fit_is_an_overflow(served):
    client = await served.open(context_tokens=20)
    await ask(client, [USER], max_tokens=1000)
    request = served.engine.requests[0]
    assert len(request.context) + request.max_tokens == 20
    status, body = await ask(client, [{"role": "user", "content": "hello " * 30}])
    assert status == 400
    assert body["error"]["code"] == "context_length_exceeded"
    assert len(served.engine.requests) == 1


async def test_a_request_that_cuts_the_law_down_is_served_and_recorded_as_truncated(served):
    client = await served.open()
    await ask(client, [USER], response_format={"type": "json_object"})
    assert served.ledger.read_calls("e")[0].sampling.law is SamplingLaw.TRUNCATED


ANTHROPIC_TOOLS = [{"name": "write", "input_schema": TOOLS[0]["function"]["parameters"]}]
RESPONSES_TOOLS = [{"type": "function", **TOOLS[0]["function"]}]


async def post(client: aiohttp.ClientSession, path: str, body: dict, headers: dict | None = None):
    async with client.post(f"http://proxy{path}", json=body, headers=headers) as response:
        return response.status, await response.json()


async def test_an_anthropic_history_that_comes_back_is_restored(served):
    served.engine.answer = write_amber
    client = await served.open()
    body = {"messages": [USER], "tools": ANTHROPIC_TOOLS, "max_tokens": 50}
    _, first = await post(client, "/v1/messages", body)
    (block,) = first["content"]
    result = {"type": "tool_result", "tool_use_id": block["id"], "content": "saved"}
    history = [USER, {"role": "assistant", "content": [block]}, {"role": "user", "content": [result]}]
    _, second = await post(client, "/v1/messages", {**body, "messages": history})
    calls = served.ledger.read_calls("e")
    assert [call.verdict for call in calls] == [Verdict.RENDERED, Verdict.RESTORED]
    assert [call.dialect for call in calls] == ["anthropic", "anthropic"]
    assert second["usage"]["input_tokens"] == calls[1].context_tokens
    assert second["stop_reason"] == "tool_use"


async def test_a_responses_history_that_comes_back_is_restored(served):
    served.engine.answer = write_amber
    client = await served.open()
    body = {"input": [USER], "tools": RESPONSES_TOOLS}
    _, first = await post(client, "/v1/responses", body)
    (item,) = first["output"]
    result = {"type": "function_call_output", "call_id": item["call_id"], "output": "saved"}
    await post(client, "/v1/responses", {**body, "input": [USER, item, result]})
    assert [call.verdict for call in served.ledger.read_calls("e")] == [Verdict.RENDERED, Verdict.RESTORED]


@pytest.mark.parametrize(
    ("path", "body", "last"),
    [
        ("/v1/messages", {"messages": [USER], "tools": ANTHROPIC_TOOLS}, "message_stop"),
        ("/v1/responses", {"input": [USER], "tools": RESPONSES_TOOLS}, "response.completed"),
    ],
)
async def test_a_repeated_request_id_gets_the_same_stream(served, path, body, last):
    served.engine.answer = write_amber
    client = await served.open()
    texts = []
    for _ in range(2):
        headers = {"x-gyre-request-id": "r1"}
        async with client.post(f"http://proxy{path}", json={**body, "stream": True}, headers=headers) as response:
            assert response.content_type == "text/event-stream"
            texts.append(await response.text())
    assert texts[0] == texts[1]
    assert f"event: {last}\n" in texts[0]
    assert len(served.engine.requests) == 1


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/messages/count_tokens", {"messages": [USER]}), ("/v1/responses/input_tokens", {"input": "hello"})],
)
async def test_counting_tokens_tells_the_length_of_the_prompt_and_is_no_call(served, path, body):
    client = await served.open()
    status, counted = await post(client, path, body)
    assert status == 200
    assert not served.ledger.read_calls("e")
    await ask(client, [USER])
    assert counted["input_tokens"] == served.ledger.read_calls("e")[0].context_tokens


@pytest.mark.parametrize(
    ("path", "body", "text"),
    [
        ("/v1/messages", {"messages": [{"role": "user", "content": "hello " * 30}]}, "tokens > 20 maximum"),
        ("/v1/responses", {"input": "hello " * 30}, "exceeds the context window"),
    ],
)
async def test_an_overflow_is_told_in_the_words_of_the_dialect(served, path, body, text):
    client = await served.open(context_tokens=20)
    status, answer = await post(client, path, body)
    assert status == 400
    assert text in answer["error"]["message"]


async def test_the_compaction_endpoint_answers_and_its_call_is_a_summary(served):
    client = await served.open(marks=RoleMarks(), context_tokens=2000)
    served.engine.answer = write_amber
    _, first = await post(client, "/v1/responses", {"input": [USER], "tools": RESPONSES_TOOLS})
    (item,) = first["output"]
    result = {"type": "function_call_output", "call_id": item["call_id"], "output": "saved"}
    served.engine.answer = say_done
    history = {"input": [USER, item, result], "tools": RESPONSES_TOOLS}
    status, compacted = await post(client, "/v1/responses/compact", history)
    assert status == 200
    assert [each["type"] for each in compacted["output"]] == ["message", "compaction"]
    call = served.ledger.read_calls("e")[1]
    assert (call.role, call.verdict) == (Role.MAIN_SUMMARY, Verdict.RESTORED)
    status, _ = await post(client, "/v1/responses", {"input": compacted["output"], "tools": RESPONSES_TOOLS})
    assert status == 200


async def test_several_choices_are_calls_of_one_request_with_seeds_of_their_own(served):
    client = await served.open()
    _, body = await ask(client, [USER], n=3)
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    calls = served.ledger.read_calls("e")
    assert [call.choice_index for call in calls] == [0, 1, 2]
    assert len({request.seed for request in served.engine.requests}) == 3


async def test_an_answer_ends_at_a_stop_text_and_stays_the_policys_own(served):
    served.engine.answer = lambda _: [*TOKENIZER.encode("write STOP amber STOP"), TOKENIZER.special("<end>")]
    client = await served.open()
    _, body = await ask(client, [USER], stop=["STOP", "nowhere"])
    message = body["choices"][0]["message"]
    assert (message["content"], body["choices"][0]["finish_reason"]) == ("write ", "stop")
    await ask(client, [USER, message, USER])
    first, second = served.ledger.read_calls("e")
    assert TOKENIZER.decode(first.output.tolist()) == "write STOP"
    assert len(first.output) == len(first.behaviour_logprobs) == sum(run.count for run in first.versions)
    assert first.sampling.law is SamplingLaw.POLICY
    assert second.verdict is Verdict.RESTORED


async def test_probes_and_unknown_paths_are_answered_at_once_and_are_no_calls(served):
    client = await served.open()
    for path, status in (("/", 200), ("/v1/messages", 200), ("/v1/models", 200), ("/v2/nothing", 404)):
        async with client.head(f"http://proxy{path}") as response:
            assert response.status == status
    for method, path in (("GET", "/v1/responses/resp_1"), ("POST", "/v1/embeddings"), ("DELETE", "/")):
        async with client.request(method, f"http://proxy{path}") as response:
            text = await response.text()
            assert response.status == 404
            assert f"{method} {path} is not served here" in json.loads(text)["error"]["message"]
            assert "\n" not in text
    assert not served.ledger.read_calls("e")


async def test_the_policy_is_the_one_model_that_is_listed(served):
    client = await served.open(model="policy")
    async with client.get("http://proxy/v1/models") as response:
        assert [model["id"] for model in (await response.json())["data"]] == ["policy"]
    async with client.get("http://proxy/v1/models/policy") as response:
        assert (await response.json())["id"] == "policy"
    async with client.get("http://proxy/v1/models/other") as response:
        assert response.status == 404


async def test_a_body_over_the_limit_is_refused_in_the_words_of_the_dialect(served):
    limits = DoorLimits(body_bytes=1000)
    served.proxy = Proxy(engine=served.engine, store=served.ledger, renderer=RENDERER, clock=lambda: 1.0, limits=limits)
    await served.proxy.start()
    client = await served.open()
    status, body = await post(client, "/v1/messages", {"messages": [{"role": "user", "content": "x" * 2000}]})
    assert status == 413
    assert body["error"]["type"] == "request_too_large"


async def test_receipts_are_stored(served):
    client = await served.open()
    await ask(client, [USER], {"x-gyre-request-id": "r1"})
    receipt = {"request_id": "r1", "delivered": "complete", "sent_bytes": 12}
    async with client.post("http://proxy/_shim/receipt", json=receipt) as response:
        assert response.status == 200
    assert served.ledger.read_calls("e")[0].delivered is Delivered.COMPLETE


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"{not json", "not JSON"),
        (b"[1]", "expected an object"),
        (b'{"messages": []}', "messages"),
        (b'{"messages": [{"content": "x"}]}', "messages[0]"),
        (b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', "image_url"),
        (b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": -1}', "max_tokens"),
        (b'{"messages": [{"role": "user", "content": "x"}], "tools": [{}]}', "tools[0]"),
        (b'{"messages": [{"role": "assistant", "tool_calls": [{}]}]}', "messages[0].tool_calls"),
    ],
)
async def test_a_wrong_body_is_answered_with_what_is_wrong(served, body, expected):
    client = await served.open()
    async with client.post("http://proxy/v1/chat/completions", data=body) as response:
        assert response.status == 400
        assert expected in (await response.json())["error"]["message"]
    assert not served.engine.requests


async def test_executions_have_sockets_of_their_own_and_a_closed_one_is_gone(served):
    first, second = await served.open("a"), await served.open("b")
    await ask(first, [USER])
    await served.proxy.close_execution("a")
    assert not (served.folder / "a").exists()
    assert (await ask(second, [USER]))[0] == 200
    assert len(served.ledger.read_calls("a")) == len(served.ledger.read_calls("b")) == 1
    assert (served.folder / "b").stat().st_mode & 0o777 == 0o600


async def test_special_text_of_a_user_stays_text(served):
    client = await served.open()
    await ask(client, [{"role": "user", "content": "<end><asst><arg>"}])
    context = served.engine.requests[0].context.tolist()
    assert context.count(TOKENIZER.special("<end>")) == 1
    assert context.count(TOKENIZER.special("<arg>")) == 0
    assert context[-1] == TOKENIZER.special("<asst>")


async def test_roles_come_from_what_the_harness_marks(served):
    served.engine.answer = write_amber
    client = await served.open()
    for headers in (
        {"X-Gyre-Agent": "main"},
        {"X-Gyre-Agent": "sub-1", "X-Gyre-Parent": "main"},
        {"X-Gyre-Agent": "main", "X-Gyre-Request": "compaction"},
    ):
        await ask(client, [USER, {"role": "user", "content": str(headers)}], headers, tools=TOOLS)
    calls = served.ledger.read_calls("e")
    assert [(call.agent_key, call.role.value) for call in calls] == [
        ("main", "main"),
        ("sub-1", "sub-agent"),
        ("main", "main-summary"),
    ]


async def test_a_role_that_later_requests_change_is_revised_in_the_ledger(served):
    client = await served.open(marks=RoleMarks())
    await ask(client, [USER])
    assert served.ledger.read_calls("e")[0].role is Role.AUXILIARY
    await served.proxy.close_execution("e")
    assert served.ledger.read_calls("e")[0].role is Role.MAIN
