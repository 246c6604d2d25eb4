"""From imported calls to trees; where token ids are absent, messages are rendered with a tokenizer that is named.

A rendered prompt continues the path of an earlier call wherever its messages do, as at the proxy, so the work is linear
in unique text. The template is ChatML in plain text; only its own marks become special tokens, never the text of users.
"""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
from tokenizers import Tokenizer

from opengyre.core.chat import Message, Tool
from opengyre.core.errors import FileError, InputError
from opengyre.core.types import Int32Array, Role, Verdict, VersionRun
from opengyre.run.imports.parts import ImportedCall, ImportedExecution
from opengyre.trajectory.match import PathIndex
from opengyre.trajectory.tree import Exclusion, TrajectoryTree, TreeCall

BYTES = "bytes"
_OPEN, _CLOSE = "<|im_start|>", "<|im_end|>"


class TextTokenizer:
    """Text to ids: one token a byte, or a ``tokenizer.json`` of the tokenizers library.

    Args:
        name: ``bytes`` or the path of the file.

    >>> TextTokenizer("bytes").encode("<|im_end|>").tolist() == list(b"<|im_end|>")
    True
    """

    def __init__(self, name: str = BYTES) -> None:
        self.name = name
        self._tokenizer: Tokenizer | None = None
        if name != BYTES:
            self._tokenizer = _load(Path(name))
            self._tokenizer.encode_special_tokens = True
        self._marks = {_OPEN: self._mark(_OPEN, 256), _CLOSE: self._mark(_CLOSE, 257)}

    def encode(self, text: str) -> Int32Array:
        """Return the ids of plain text, [n] int32; text that looks like a special token stays text."""
        if self._tokenizer is None:
            return np.frombuffer(text.encode(errors="surrogatepass"), np.uint8).astype(np.int32)
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, np.int32)

    def mark(self, text: str) -> Int32Array:
        """Return the ids of one of the template's own marks."""
        return self._marks[text]

    def _mark(self, text: str, byte_id: int) -> Int32Array:
        if self._tokenizer is None:
            return np.array([byte_id], np.int32)
        known = self._tokenizer.token_to_id(text)
        return self.encode(text) if known is None else np.array([known], np.int32)


def _load(path: Path) -> Tokenizer:
    wrong = "expected 'bytes' or a tokenizer.json"
    try:
        text = path.read_text()
        keys = msgspec.json.decode(text, type=dict[str, object])
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}; {wrong}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise FileError(f"{path}: not a tokenizer: {error}; {wrong}") from error
    if not isinstance(keys.get("model"), dict):
        raise FileError(f"{path}: no 'model'; {wrong}")
    return Tokenizer.from_str(text)


def tree_of_import(execution: ImportedExecution, tokenizer: TextTokenizer) -> tuple[TrajectoryTree, list[Verdict]]:
    """Return the tree of an imported execution and how each call's prompt was made.

    The tree is approximate if any call had to be rendered or has no logprobs.
    """
    is_approximate = execution.is_approximate or any(_is_approximate(call) for call in execution.calls)
    tree = TrajectoryTree(execution.execution_id, is_approximate=is_approximate)
    index = PathIndex()
    verdicts = []
    for call in execution.calls:
        match = index.match(call.messages, call.tools) if call.messages else None
        if call.tokens is None:
            parent = match.call_id if match is not None else None
            covered = match.covered if match is not None else 0
            tree.insert(_rendered(tree, call, tokenizer, parent, covered))
            verdicts.append(match.verdict if match is not None else Verdict.RENDERED)
        else:
            tree.insert(_recorded(call))
        if match is not None and call.reply is not None:
            index.add(call.call_id, match.keys, call.reply)
    return tree, verdicts


def _is_approximate(call: ImportedCall) -> bool:
    return call.tokens is None or call.tokens.logprobs is None


def _recorded(call: ImportedCall) -> TreeCall:
    tokens = call.tokens
    if tokens is None:
        raise InputError(f"call {call.call_id} has no token ids")
    logprobs = np.zeros(len(tokens.output), np.float32) if tokens.logprobs is None else tokens.logprobs
    versions = call.versions if call.versions is not None else (VersionRun(0, len(tokens.output)),)
    return TreeCall(
        call_id=call.call_id,
        request_id=call.request_id or call.call_id,
        agent=call.agent,
        role=call.role,
        context=tokens.context,
        output=tokens.output,
        logprobs=logprobs,
        versions=versions,
        exclusion=Exclusion.AUXILIARY if call.role is Role.AUXILIARY else Exclusion.NONE,
    )


def _rendered(
    tree: TrajectoryTree, call: ImportedCall, tokenizer: TextTokenizer, parent: str | None, covered: int
) -> TreeCall:
    shared = 0
    parts: list[Int32Array] = []
    if parent is None:
        parts.append(_tools(call.tools, tokenizer))
    else:
        stored = tree.calls[tree.index_of(parent)]
        shared = stored.context_tokens + stored.output_tokens
        parts.append(tokenizer.encode("\n"))
    parts += [part for message in call.messages[covered:] for part in _message(message, tokenizer)]
    parts += [tokenizer.mark(_OPEN), tokenizer.encode("assistant\n")]
    reply = call.reply if call.reply is not None else Message(role="assistant")
    output = np.concatenate((tokenizer.encode(_body(reply)), tokenizer.mark(_CLOSE)))
    return TreeCall(
        call_id=call.call_id,
        request_id=call.request_id or call.call_id,
        agent=call.agent,
        role=call.role,
        context=np.concatenate(parts),
        output=output,
        logprobs=np.zeros(0, np.float32),
        versions=(VersionRun(0, len(output)),),
        exclusion=Exclusion.AUXILIARY if call.role is Role.AUXILIARY else Exclusion.NONE,
        parent=parent,
        shared=shared,
    )


def _message(message: Message, tokenizer: TextTokenizer) -> list[Int32Array]:
    text = tokenizer.encode(f"{message.role}\n{_body(message)}")
    return [tokenizer.mark(_OPEN), text, tokenizer.mark(_CLOSE), tokenizer.encode("\n")]


def _body(message: Message) -> str:
    r"""Return reasoning, text and tool calls of a message as the template writes them.

    >>> _body(Message(role="assistant", content="yes", reasoning="hm"))
    '<think>\nhm\n</think>\nyes'
    """
    thought = f"<think>\n{message.reasoning}\n</think>\n" if message.reasoning else ""
    calls = "".join(f"\n<tool_call>\n{call.name} {call.arguments}\n</tool_call>" for call in message.tool_calls)
    return thought + message.content + calls


def _tools(tools: Sequence[Tool], tokenizer: TextTokenizer) -> Int32Array:
    if not tools:
        return np.zeros(0, np.int32)
    lines = "\n".join(f"{tool.name}: {tool.description}" for tool in tools)
    return np.concatenate(
        (tokenizer.mark(_OPEN), tokenizer.encode(f"tools\n{lines}"), tokenizer.mark(_CLOSE), tokenizer.encode("\n"))
    )
