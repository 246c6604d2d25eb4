"""ATIF trajectories, with token ids and logprobs where the file has them; files that steps refer to are followed.

An agent step that is not copied context is a call. Its prompt is ``metrics.prompt_token_ids``, or else what the steps
before it say. A trajectory with a summarisation index is a summary of its parent, any other that a step refers to is a
sub-agent.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from opengyre.core.chat import Message, ToolCall
from opengyre.core.errors import FileError
from opengyre.core.types import Role
from opengyre.run.imports.parts import (
    ImportedCall,
    ImportedExecution,
    Json,
    TokenRecord,
    logprob_list,
    read_object,
    text_of,
    token_ids,
)
from opengyre.trajectory.tree import TrajectoryTree

_SOURCES = {"system": "system", "user": "user", "agent": "assistant"}


def read_atif(path: Path, *, vocabulary: int | None = None) -> list[ImportedExecution]:
    """Return the execution of a trajectory with all trajectories that it refers to.

    Raises:
        FileError: A file is no ATIF trajectory, or token ids or logprobs are wrong.
    """
    calls: list[ImportedCall] = []
    waiting = [(path, Role.MAIN, "main")]
    seen: set[Path] = set()
    while waiting:
        file, role, agent = waiting.pop(0)
        if file in seen:
            continue
        seen.add(file)
        raw = _trajectory(file)
        calls += _calls(file, raw, role, agent, vocabulary)
        waiting += _references(file, raw, role, agent)
    if not calls:
        raise FileError(f"{path}:1: no agent step of its own; expected at least one")
    return [ImportedExecution(execution_id=path.name.removesuffix(".json"), calls=tuple(calls))]


def files_referred_to(path: Path) -> set[Path]:
    """Return the files that a trajectory refers to and that lie beside it."""
    return {file for file, _, _ in _references(path, _trajectory(path), Role.MAIN, "main")}


def _trajectory(path: Path) -> Json:
    raw = read_object(path)
    version = raw.get("schema_version")
    if not isinstance(version, str) or not version.startswith("ATIF-v1") or not isinstance(raw.get("steps"), list):
        raise FileError(f"{path}:1: schema_version {version!r}; expected ATIF-v1.x with a list 'steps'")
    return raw


def _references(path: Path, raw: Json, role: Role, agent: str) -> list[tuple[Path, Role, str]]:
    """Return the trajectories that steps or the file refer to, as far as they lie beside it."""
    found = []
    continued = raw.get("continued_trajectory_ref")
    if isinstance(continued, str):
        found.append((_beside(path, continued), role, agent))
    for step in raw["steps"]:
        for result in _results(step):
            for reference in result.get("subagent_trajectory_ref") or ():
                file = _beside(path, str(reference.get("trajectory_path", "")))
                if file is not None:
                    found.append((file, _role_of(file), file.name))
    return [(file, file_role, name) for file, file_role, name in found if file is not None]


def _role_of(path: Path) -> Role:
    extra = (_trajectory(path).get("agent") or {}).get("extra") or {}
    return Role.MAIN_SUMMARY if "summarization_index" in extra else Role.SUB_AGENT


def _beside(path: Path, reference: str) -> Path | None:
    """Return the file of a reference: as named, or with the prefix that the referring file has."""
    name = Path(reference).name
    if not name:
        return None
    stem = path.name.split(".trajectory", 1)[0]
    for candidate in (path.parent / reference, path.parent / name, path.parent / f"{stem}.{name}"):
        if candidate.is_file():
            return candidate
    return None


def _results(step: Json) -> Iterator[Json]:
    observation = step.get("observation")
    results = observation.get("results") if isinstance(observation, dict) else None
    yield from (result for result in results or () if isinstance(result, dict))


def _calls(path: Path, raw: Json, role: Role, agent: str, vocabulary: int | None) -> list[ImportedCall]:
    calls: list[ImportedCall] = []
    history: list[Message] = []
    for number, step in enumerate(raw["steps"]):
        where = f"{path}: steps[{number}]"
        if not isinstance(step, dict) or step.get("source") not in _SOURCES:
            raise FileError(f"{where}: expected an object with source system, user or agent")
        message = _message(step, where)
        if step["source"] == "agent" and not step.get("is_copied_context"):
            calls.append(
                ImportedCall(
                    call_id=f"{path.name.removesuffix('.json')}-s{number:04d}",
                    agent=agent,
                    role=role,
                    messages=tuple(history) or (Message(role="user"),),
                    reply=message,
                    tokens=_tokens(step.get("metrics") or {}, where, vocabulary),
                )
            )
        history.append(message)
        history += _observed(step, where)
    return calls


def _message(step: Json, where: str) -> Message:
    calls = []
    for call in step.get("tool_calls") or ():
        if not isinstance(call, dict) or not isinstance(call.get("function_name"), str):
            raise FileError(f"{where}.tool_calls: expected objects with a function_name")
        arguments = msgspec.json.encode(call.get("arguments", {})).decode()
        calls.append(ToolCall(id=str(call.get("tool_call_id", "")), name=call["function_name"], arguments=arguments))
    return Message(
        role=_SOURCES[step["source"]],
        content=text_of(step.get("message"), where),
        reasoning=str(step.get("reasoning_content") or ""),
        tool_calls=tuple(calls),
    )


def _observed(step: Json, where: str) -> list[Message]:
    role = "tool" if step.get("tool_calls") else "user"
    return [
        Message(
            role=role, content=text_of(result["content"], where), tool_call_id=str(result.get("source_call_id") or "")
        )
        for result in _results(step)
        if result.get("content") is not None
    ]


def _tokens(metrics: Mapping[str, Any], where: str, vocabulary: int | None) -> TokenRecord | None:
    prompt, completion = metrics.get("prompt_token_ids"), metrics.get("completion_token_ids")
    if prompt is None or completion is None:
        return None
    context = token_ids(prompt, f"{where}.prompt_token_ids", vocabulary=vocabulary)
    output = token_ids(completion, f"{where}.completion_token_ids", vocabulary=vocabulary)
    given = metrics.get("logprobs")
    logprobs = None if given is None else logprob_list(given, output, f"{where}.logprobs")
    return TokenRecord(context=context, output=output, logprobs=logprobs)


def metrics_of(tree: TrajectoryTree, call_id: str) -> Json:
    """Return the ATIF metrics of a stored call: what ``read_atif`` reads back."""
    index = tree.index_of(call_id)
    call = tree.calls[index]
    metrics: Json = {
        "prompt_tokens": call.context_tokens,
        "completion_tokens": call.output_tokens,
        "prompt_token_ids": tree.context_of(index).tolist(),
        "completion_token_ids": tree.output_of(index).tolist(),
    }
    if not tree.is_approximate:
        metrics["logprobs"] = call.logprobs.tolist()
    return metrics
