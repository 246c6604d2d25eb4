"""Chat to tokens and back for published models, through the ``renderers`` package; needs the extra ``transformers``.

The package turns whole conversations into tokens in one pass, and a tokenizer finds marks such as ``<|im_end|>`` in
any text, whoever wrote it. So each mark in text of users, tools and harnesses is split by a token of our own, which is
taken out of the result: the text keeps its characters and has no mark in it.
"""

import logging
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import renderers
from jinja2 import TemplateError
from renderers.base import RENDERER_REGISTRY
from renderers.base import Renderer as Packaged
from tokenizers import AddedToken
from transformers import AutoTokenizer

from opengyre.core.chat import Message, Tool, ToolCall
from opengyre.core.errors import CallError, FileError, InputError
from opengyre.core.types import Int32Array

_log = logging.getLogger(__name__)
_SPLIT = "<|gyre-split|>"
_PROMPT_TAIL = 512
"""Tokens of a prompt that decide how its reply is read: the head of the reply is among the last few."""
_FORMAT_OF_MODEL = {"qwen3": "qwen3", "qwen3_moe": "qwen3"}
"""Kinds of model all of whose published checkpoints have one template."""


class PackagedRenderer:
    """The format of a published model; implements ``core.chat.ChatRenderer``.

    Args:
        tokenizer: A fast tokenizer of transformers; a token is added to it.
        form: Name of a format of the package (``qwen3``, ``glm-4.5``, ``gpt-oss``, ...); ``auto`` looks up the model
            that the tokenizer is named after, and takes the template of the tokenizer if the package does not know it.

    Raises:
        InputError: No format of that name, or the tokenizer is not one of its models.

    Choice: reasoning of earlier turns stays where it is (`thinking_retention="all"`), else no call after the next user
    message could be restored. Templates of some models would take it out.
    """

    def __init__(self, tokenizer: Any, form: str = "auto") -> None:  # noqa: ANN401 - an untyped package's class
        tokenizer.add_tokens([AddedToken(_SPLIT, normalized=False, special=False)])
        self._split = int(tokenizer.convert_tokens_to_ids(_SPLIT))
        self._tokenizer = tokenizer
        self._packaged = _packaged(tokenizer, form)
        self.stop_ids: tuple[int, ...] = tuple(self._packaged.get_stop_token_ids())
        self.is_prefix_stable: bool = not isinstance(self._packaged, renderers.DefaultRenderer)
        self._takes_developer = "gpt-oss" in self.form
        added = tokenizer.added_tokens_decoder.values()
        self._control = _starts_of(token.content for token in added if token.special)
        self._marks = _starts_of(token.content for token in added if token.special or "<" in token.content)

    @property
    def form(self) -> str:
        """Name of the format in use; ``default`` is the tokenizer's own template."""
        return str(self._packaged.config.name)

    def render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> Int32Array:
        """Return the tokens of the whole prompt, [C] int32.

        Raises:
            CallError: The model's template refuses these messages.
        """
        return self._without_splits(self._rendered(messages, tools, is_asking=True))

    def bridge(
        self, context: Int32Array, output: Int32Array, messages: Sequence[Message], tools: Sequence[Tool]
    ) -> Int32Array | None:
        """Return the tokens that follow a prompt and its sampled output, [n] int32, or None if none can follow."""
        if not self.is_prefix_stable:
            return None
        before = [*context[-_PROMPT_TAIL:].tolist(), *output.tolist()]
        head = before[: len(before) - len(output)]
        told = [self._outgoing(message) for message in messages]
        bridged = self._packaged.bridge_to_next_turn(head, output.tolist(), told, tools=_specs(tools, self._guarded))
        if bridged is None or bridged.token_ids[: len(before)] != before:
            return None
        return self._without_splits(bridged.token_ids[len(before) :])

    def parse(self, context: Int32Array, output: Int32Array, tools: Sequence[Tool]) -> Message:
        """Return the assistant message of sampled tokens; malformed tool calls stay in ``content``."""
        prompt = context[-_PROMPT_TAIL:].tolist()
        parsed = self._packaged.parse_response(output.tolist(), tools=_specs(tools, str) or None, prompt_ids=prompt)
        content, calls = parsed.content, []
        for call in parsed.tool_calls:
            if call.status == renderers.ToolCallParseStatus.OK and call.name:
                calls.append(ToolCall(id=call.id or "", name=call.name, arguments=_argument_text(call)))
            else:
                content += self._malformed(call, output)
        reasoning = parsed.reasoning_content or ""
        return Message(role="assistant", content=content, reasoning=reasoning, tool_calls=tuple(calls))

    def encode_reply(self, message: Message) -> Int32Array:
        """Return what a model that says this message samples, its end included, [n] int32.

        Raises:
            InputError: The format writes the reply in another place than where its prompt ends.
        """
        asked = [Message(role="user", content="?")]
        prompt = self._rendered(asked, (), is_asking=True)
        whole = self._rendered([*asked, message], (), is_asking=False)
        if whole[: len(prompt)] != prompt:
            raise InputError(f"format {self.form}: a reply does not follow its prompt, expected one that does")
        said = whole[len(prompt) :]
        ends = next((place for place, token in enumerate(said) if token in self.stop_ids), len(said) - 1)
        return self._without_splits(said[: ends + 1])

    def _rendered(self, messages: Sequence[Message], tools: Sequence[Tool], *, is_asking: bool) -> list[int]:
        told = [self._outgoing(message) for message in messages]
        specs = _specs(tools, self._guarded) or None
        try:
            return list(self._packaged.render_ids(told, tools=specs, add_generation_prompt=is_asking))
        except (ValueError, TypeError, KeyError, TemplateError) as error:
            said = f"format {self.form} cannot express these messages: {error}"
            raise CallError(said, status=400, code="unsupported_messages") from error

    def _outgoing(self, message: Message) -> dict[str, Any]:
        """Return a message as the package takes it."""
        is_reply = message.role == "assistant"
        starts = self._control if is_reply else self._marks
        role = "system" if message.role == "developer" and not self._takes_developer else message.role
        out: dict[str, Any] = {"role": role, "content": _split(message.content, starts)}
        if message.reasoning:
            out["reasoning_content"] = _split(message.reasoning, starts)
        if message.tool_calls:
            out["tool_calls"] = [_outgoing_call(call, starts) for call in message.tool_calls]
        if message.tool_call_id:
            out["tool_call_id"] = message.tool_call_id
        if message.name:
            out["name"] = message.name
        return out

    def _guarded(self, text: str) -> str:
        return _split(text, self._marks)

    def _without_splits(self, tokens: Sequence[int]) -> Int32Array:
        ids = np.asarray(tokens, np.int32)
        kept: Int32Array = ids[ids != self._split]
        return kept

    def _malformed(self, call: renderers.ParsedToolCall, output: Int32Array) -> str:
        """Return the text of a call that cannot be read, marks included where the package says which tokens it has."""
        if call.token_span is None:
            return str(call.raw)
        first, end = call.token_span
        return str(self._tokenizer.decode(output[first:end].tolist(), skip_special_tokens=False))


def load_renderer(source: Path, form: str = "auto") -> PackagedRenderer:
    """Return the renderer of a model's folder; a format that is not prefix-stable is announced.

    Args:
        source: Folder with `tokenizer.json` (and `config.json`, which may name the kind of model).
        form: As in ``PackagedRenderer``.

    Raises:
        FileError: The folder holds no fast tokenizer.
        InputError: The format is unknown or does not fit.
    """
    if not (source / "tokenizer.json").is_file():
        raise FileError(f"{source}: no tokenizer.json, expected the folder of a model or of its tokenizer")
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(source))
    except (OSError, ValueError) as error:
        raise FileError(f"{source}: no tokenizer of transformers: {error}") from error
    renderer = PackagedRenderer(tokenizer, _form_of(source) if form == "auto" else form)
    if not renderer.is_prefix_stable:
        _log.warning(
            "%s: format %s is not prefix-stable: every call is rendered anew and no sampled token is restored; "
            "name the model's own format",
            source,
            renderer.form,
        )
    return renderer


def _form_of(source: Path) -> str:
    """Return the format that a folder's ``config.json`` tells, else ``auto``."""
    path = source / "config.json"
    if not path.is_file():
        return "auto"
    try:
        kind = msgspec.json.decode(path.read_bytes(), type=dict[str, Any]).get("model_type")
    except msgspec.DecodeError as error:
        raise FileError(f"{path}: {error}") from error
    return _FORMAT_OF_MODEL.get(str(kind), "auto")


def _packaged(tokenizer: Any, form: str) -> Packaged:  # noqa: ANN401 - an untyped package's class
    """Return the package's renderer, with earlier reasoning kept where the format can."""
    try:
        config = renderers.config_from_name(form)
    except (KeyError, ValueError) as error:
        raise InputError(f"format {form!r}: expected auto or one of {', '.join(_forms())}") from error
    try:
        made = renderers.create_renderer(tokenizer, config)
        if isinstance(made, renderers.DefaultRenderer):
            return made
        kept = type(made.config).model_validate({"name": made.config.name, "thinking_retention": "all"})
        return renderers.create_renderer(tokenizer, kept)
    except (AssertionError, ValueError) as error:
        raise InputError(f"format {form}: {tokenizer.name_or_path}: {error}") from error


def _forms() -> list[str]:
    return sorted(RENDERER_REGISTRY)


def _starts_of(marks: Any) -> re.Pattern[str]:  # noqa: ANN401 - any iterable of texts
    """Return what finds the first character of every mark, also of marks that overlap.

    >>> _split("a<x>", _starts_of(["<x>"]))
    'a<<|gyre-split|>x>'
    """
    by_first: dict[str, list[str]] = defaultdict(list)
    for mark in marks:
        if len(mark) > 1:
            by_first[mark[0]].append(re.escape(mark[1:]))
    parts = [f"{re.escape(first)}(?={'|'.join(rest)})" for first, rest in sorted(by_first.items())]
    return re.compile("|".join(parts) or r"(?!)")


def _split(text: str, starts: re.Pattern[str]) -> str:
    return starts.sub(lambda found: found[0] + _SPLIT, text)


def _outgoing_call(call: ToolCall, starts: re.Pattern[str]) -> dict[str, Any]:
    function = {"name": call.name, "arguments": _split(call.arguments, starts)}
    return {"id": call.id, "type": "function", "function": function}


def _specs(tools: Sequence[Tool], guarded: Any) -> list[dict[str, Any]]:  # noqa: ANN401 - str to str
    """Return tools in the envelope that the templates print."""
    return [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": guarded(tool.description),
                "parameters": _texts_replaced(tool.schema, guarded),
            },
        }
        for tool in tools
    ]


def _texts_replaced(value: Any, guarded: Any) -> Any:  # noqa: ANN401 - any JSON
    if isinstance(value, str):
        return guarded(value)
    if isinstance(value, list):
        return [_texts_replaced(item, guarded) for item in value]
    if isinstance(value, dict):
        return {key: _texts_replaced(item, guarded) for key, item in value.items()}
    return value


class _Block(msgspec.Struct):
    arguments: msgspec.Raw = msgspec.Raw(b"{}")


def _argument_text(call: renderers.ParsedToolCall) -> str:
    """Return the arguments as the model wrote them where it writes JSON, else as JSON."""
    if isinstance(call.arguments, str):
        return call.arguments
    try:
        text = bytes(msgspec.json.decode(call.raw, type=_Block).arguments).decode()
        if msgspec.json.decode(text) == call.arguments:
            return text
    except msgspec.MsgspecError:
        pass
    return msgspec.json.encode(call.arguments or {}).decode()
