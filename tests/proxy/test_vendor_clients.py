"""The vendors' own Python clients read what the dialects answer, streamed and not, every field in its place.

The clients are no dependency: install ``openai`` and ``anthropic`` beside the checkout to run these.
"""

import json

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from opengyre.core.errors import ContextOverflowError
from opengyre.core.types import Finish
from opengyre.proxy.dialects import COUNTERS, DIALECTS, anthropic, responses

REPLIES = {
    "text": ("hello\n", "", ()),
    "thought": ("done", "Let me think.\n", ()),
    "calls": ("Looking.", "why", (("sh", '{"b": 1,  "a":"é"}'), ("sh", '{"cmd":"ls"}'))),
}
CHAT_TOOL = {"type": "function", "function": {"name": "sh", "parameters": {"type": "object"}}}
ASK = [{"role": "user", "content": "go"}]


class Canned:
    """Serves one answer in every dialect on a loopback port."""

    def __init__(self) -> None:
        self.answer = None
        self.error = None
        self.bodies = []
        application = web.Application()
        application.router.add_post("/{path:.*}", self.serve)
        self.server = TestServer(application)

    async def serve(self, request):
        body = json.loads(await request.read())
        self.bodies.append(body)
        if request.path in COUNTERS:
            return web.Response(body=COUNTERS[request.path][1](12), content_type="application/json")
        dialect = DIALECTS[request.path]
        parsed = dialect.parse_request(body)
        if self.error is not None:
            events = dialect.stream_error(self.error) if parsed.stream else None
            if events is not None:
                return web.Response(body=events, content_type="text/event-stream")
            data = dialect.error_body(self.error)
            return web.Response(body=data, status=400, content_type="application/json")
        if parsed.stream:
            data = b"".join(dialect.stream_chunks(parsed, self.answer))
            return web.Response(body=data, content_type="text/event-stream")
        return web.Response(body=dialect.answer_body(parsed, self.answer), content_type="application/json")


@pytest.fixture
async def canned():
    made = Canned()
    await made.server.start_server()
    yield made
    await made.server.close()


@pytest.fixture
async def openai_client(canned):
    sdk = pytest.importorskip("openai")
    async with sdk.AsyncOpenAI(base_url=str(canned.server.make_url("/v1")), api_key="x", max_retries=0) as client:
        yield client


@pytest.fixture
async def anthropic_client(canned):
    sdk = pytest.importorskip("anthropic")
    async with sdk.AsyncAnthropic(base_url=str(canned.server.make_url("/")), api_key="x", max_retries=0) as client:
        yield client


def strictly(read):
    """Check a client's object against its own schema, which clients leave out; return it as plain values."""
    plain = read.to_dict(mode="json", warnings=False)
    type(read).model_validate(plain)
    return plain


@pytest.mark.parametrize("kind", REPLIES)
async def test_the_client_of_openai_reads_a_chat_answer(made, canned, openai_client, kind):
    message = made.reply(*REPLIES[kind])
    canned.answer = made.answered(message, message)
    read = await openai_client.chat.completions.create(model="m", messages=ASK, tools=[CHAT_TOOL], n=2)
    plain = strictly(read)
    assert DIALECTS["/v1/chat/completions"].parse_response(plain) == message
    assert len(read.choices) == 2
    assert read.usage.prompt_tokens == 12


@pytest.mark.parametrize("kind", REPLIES)
async def test_the_client_of_openai_adds_up_a_chat_stream(made, canned, openai_client, kind):
    message = made.reply(*REPLIES[kind])
    canned.answer = made.answered(message)
    stream = openai_client.chat.completions.stream(
        model="m", messages=ASK, tools=[CHAT_TOOL], stream_options={"include_usage": True}
    )
    async with stream as events:
        async for event in events:
            if event.type == "chunk":
                strictly(event.chunk)
        read = await events.get_final_completion()
    assert DIALECTS["/v1/chat/completions"].parse_response(read.to_dict(mode="json", warnings=False)) == message
    assert read.usage.completion_tokens == 7


@pytest.mark.parametrize("kind", REPLIES)
async def test_the_client_of_anthropic_reads_an_answer(made, canned, anthropic_client, kind):
    message = made.reply(*REPLIES[kind])
    canned.answer = made.answered(message)
    read = await anthropic_client.messages.create(model="m", messages=ASK, max_tokens=9)
    assert_same(anthropic.parse_response(strictly(read)), message)
    again = [*ASK, {"role": "assistant", "content": [block.to_dict() for block in read.content]}, *ASK]
    await anthropic_client.messages.create(model="m", messages=again, max_tokens=9)
    assert_same(anthropic.parse_request(canned.bodies[-1]).messages[1], message)


@pytest.mark.parametrize("kind", REPLIES)
async def test_the_client_of_anthropic_adds_up_a_stream(made, canned, anthropic_client, kind):
    message = made.reply(*REPLIES[kind])
    canned.answer = made.answered(message)
    deltas = []
    async with anthropic_client.messages.stream(model="m", messages=ASK, max_tokens=9) as events:
        async for event in events:
            if event.type == "content_block_delta" and event.delta.type == "input_json_delta":
                deltas.append(event.delta.partial_json)
        read = await events.get_final_message()
    assert_same(anthropic.parse_response(strictly(read)), message)
    assert deltas == [call.arguments for call in message.tool_calls]
    assert (read.usage.input_tokens, read.usage.output_tokens) == (12, 7)


async def test_the_client_of_anthropic_reads_counts_and_stop_sequences(made, canned, anthropic_client):
    assert (await anthropic_client.messages.count_tokens(model="m", messages=ASK)).input_tokens == 12
    canned.answer = made.answered(made.reply("x"), stop_sequence="END")
    read = await anthropic_client.messages.create(model="m", messages=ASK, max_tokens=9, stop_sequences=["END"])
    assert (strictly(read)["stop_reason"], read.stop_sequence) == ("stop_sequence", "END")


@pytest.mark.parametrize("kind", REPLIES)
async def test_the_client_of_openai_reads_a_responses_answer(made, canned, openai_client, kind):
    message = made.reply(*REPLIES[kind])
    canned.answer = made.answered(message)
    read = await openai_client.responses.create(model="m", input="go")
    assert responses.parse_response(strictly(read)) == message
    again = [*ASK, *(item.to_dict() for item in read.output)]
    await openai_client.responses.create(model="m", input=again)
    assert responses.parse_request(canned.bodies[-1]).messages[1] == message


@pytest.mark.parametrize("kind", REPLIES)
@pytest.mark.parametrize("finish", [None, Finish.LENGTH])
async def test_the_client_of_openai_adds_up_a_responses_stream(made, canned, openai_client, kind, finish):
    message = made.reply(*REPLIES[kind])
    canned.answer = made.answered(message, finish=finish)
    async with openai_client.responses.stream(model="m", input="go") as events:
        async for event in events:
            strictly(event)
        read = event.response
    assert event.type == ("response.incomplete" if finish else "response.completed")
    assert responses.parse_response(strictly(read)) == message
    assert read.output_text == message.content


async def test_the_client_of_openai_reads_a_compaction(made, canned, openai_client):
    canned.answer = made.answered(made.reply("all is well"))
    read = await openai_client.responses.compact(model="m", input=ASK)
    assert (read.object, read.usage.output_tokens) == ("response.compaction", 7)
    items = [read.output[0].to_dict(mode="json", warnings=False), strictly(read.output[-1])]
    kept, summary = responses.parse_request({"input": items}).messages
    assert kept.content == "go"
    assert summary.content.endswith("all is well")


async def test_the_clients_read_an_overflow_as_a_bad_request(canned, openai_client, anthropic_client):
    canned.error = ContextOverflowError(700, 640)
    openai, vendor = pytest.importorskip("openai"), pytest.importorskip("anthropic")
    with pytest.raises(openai.BadRequestError) as told:
        await openai_client.chat.completions.create(model="m", messages=ASK)
    assert told.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as told:
        await openai_client.responses.create(model="m", input="go")
    assert told.value.code == "context_length_exceeded"
    with pytest.raises(vendor.BadRequestError, match="prompt is too long: 700 tokens > 640 maximum"):
        await anthropic_client.messages.create(model="m", messages=ASK, max_tokens=9)


def assert_same(read, message):
    """Check that two messages are equal but for the spaces in arguments, which objects do not keep."""
    assert with_spaceless(read) == with_spaceless(message)


def with_spaceless(message):
    calls = [
        msgspec.structs.replace(call, arguments=msgspec.json.encode(msgspec.json.decode(call.arguments)).decode())
        for call in message.tool_calls
    ]
    return msgspec.structs.replace(message, tool_calls=tuple(calls))
