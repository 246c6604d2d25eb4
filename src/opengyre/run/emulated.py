"""What a run on emulated cells needs beside its configuration: costs, tokenizer, scripted replies, a first version."""

import itertools
import random
from collections.abc import Iterator

import msgspec
import numpy as np

from opengyre.cell.emulated import write_emulated_version
from opengyre.core.chat import Message
from opengyre.core.config import Config
from opengyre.core.errors import ConfigError
from opengyre.core.events import execution_id_of
from opengyre.core.types import Kind
from opengyre.engine.emulated import EmulatedCosts, ReplyTable, ScriptedReply, context_key, script_of
from opengyre.model.chat import EmbeddedRenderer
from opengyre.model.tokenizer import SPECIALS
from opengyre.run.folder import RunFolder
from opengyre.run.task_source import task_source
from opengyre.run.warmstart import TOKENIZER, WarmStartRecipe
from opengyre.tasks.minirepo.demonstrations import Demonstration, DemonstrationContext, Noise
from opengyre.tasks.minirepo.tasks import minirepo_package, visible_inputs
from opengyre.tasks.minirepo.vocabulary import train_tokenizer

REPLIES = "replies.msgpack"
PLANNED = "planned.msgpack"
SCRIPTS = 16
"""Executions of the noisy expert that are played beforehand for each task; an execution of the run follows one."""


def emulated_costs(config: Config) -> EmulatedCosts | None:
    """Return the costs of emulated cells; None where cells compute.

    Raises:
        ConfigError: A key of ``cells.options`` is unknown or out of range.
    """
    if config.cells.engine != "emulated":
        return None
    try:
        return msgspec.convert(config.cells.options, EmulatedCosts, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"cells.options: {error}") from error


def install_scripts(folder: RunFolder) -> None:
    """Put tokenizer, replies, the planned work and a version 0 without weights into a new run folder."""
    tokenizer = train_tokenizer(WarmStartRecipe().vocabulary)
    tokenizer.save(folder.path / TOKENIZER)
    renderer = EmbeddedRenderer(tokenizer)
    scripts = scripts_of(folder.config, renderer)
    plain_ids = tokenizer.vocab_size - len(SPECIALS)
    table = reply_table(scripts, end_id=renderer.stop_ids[0], plain_ids=plain_ids)
    (folder.path / REPLIES).write_bytes(msgspec.msgpack.encode(table))
    (folder.path / PLANNED).write_bytes(msgspec.msgpack.encode(planned_work(folder.config, scripts)))
    write_emulated_version(folder.weights / "v00000-0.safetensors", version=0, incarnation=0)


class PlannedCall(msgspec.Struct, frozen=True, array_like=True):
    """One call as it will be made: sizes, and what its execution does before the next one.

    >>> PlannedCall(key=7, tokens=bytes(40), context_tokens=120, wait_s=0.2).output_tokens
    10
    """

    key: int
    """Of its context."""
    tokens: bytes
    """Reply, int32."""
    context_tokens: int
    wait_s: float
    """What the harness waits behind the answer, its own work aside."""

    @property
    def output_tokens(self) -> int:
        """Tokens of the reply."""
        return len(self.tokens) // 4


Script = list[PlannedCall]
"""The calls of one execution, in the order in which its harness makes them."""


def scripts_of(config: Config, renderer: EmbeddedRenderer) -> dict[str, list[Script]]:
    """Return ``SCRIPTS`` executions of the noisy expert for every task that the run can meet, by task id."""
    wait_s = float(config.harness.options.get("tool_wait_s", 0.0))
    return {
        task_id: list(itertools.islice(_functions(renderer, task_id, seed=config.run.seed, wait_s=wait_s), SCRIPTS))
        for task_id in sorted({task_id for _, task_id in _tasks_of(config)})
    }


def reply_table(scripts: dict[str, list[Script]], *, end_id: int, plain_ids: int) -> ReplyTable:
    """Return the table from which emulated cells answer."""
    replies: dict[int, list[ScriptedReply]] = {}
    for of_task in scripts.values():
        for number, script in enumerate(of_task):
            for key, tokens in {call.key: call.tokens for call in script}.items():
                replies.setdefault(key, []).append(ScriptedReply(number, tokens))
    return ReplyTable(replies=replies, end_id=end_id, plain_ids=plain_ids, scripts=SCRIPTS)


def planned_work(config: Config, scripts: dict[str, list[Script]]) -> dict[str, Script]:
    """Return what each training execution of the run will do, by its id: known before the run begins.

    Choice: this is what a prediction is made from. It holds as long as no execution is dropped or timed out.
    """
    planned: dict[str, Script] = {}
    for group_id, task_id in _tasks_of(config):
        if group_id is None:
            continue
        for slot in range(config.schedule.group_size):
            execution_id = execution_id_of(group_id=group_id, slot=slot, attempt=0)
            planned[execution_id] = scripts[task_id][script_of(execution_id, SCRIPTS)]
    return planned


def _functions(renderer: EmbeddedRenderer, task_id: str, *, seed: int, wait_s: float) -> Iterator[Script]:
    """Yield executions of the expert in which the reply is a function of the context, without end.

    Choice: one in which a module is delegated twice and written in two ways is left out, for an engine that sees only
    contexts could not tell the two apart.
    """
    for attempt in itertools.count():
        script = played(renderer, task_id, seed=f"{seed}-{attempt}", wait_s=wait_s)
        said: dict[int, bytes] = {}
        if all(said.setdefault(call.key, call.tokens) == call.tokens for call in script):
            yield script


def played(renderer: EmbeddedRenderer, task_id: str, *, seed: str, wait_s: float) -> Script:
    """Return the calls of one execution of the expert; its coders' calls stand behind the one that asked for them."""
    _, split, number = task_id.split("-")
    package = minirepo_package(split, int(number))
    expert = Demonstration(package, renderer, random.Random(f"emulated-{split}-{number}-{seed}"), Noise())
    expert.visible = visible_inputs(split, int(number))
    contexts = expert.run()
    coders = (context for context in contexts if not context.is_lead)
    modules = {module for module, _ in package.modules}
    script: Script = []
    for lead in (context for context in contexts if context.is_lead):
        for index, reply in enumerate(lead.replies):
            script.append(_planned(renderer, lead, index, wait_s=0.0))
            if _delegated(reply) in modules:
                coder = next(coders)
                script += [
                    _planned(renderer, coder, turn, wait_s=0.0 if _is_end(said) else wait_s)
                    for turn, said in enumerate(coder.replies)
                ]
    return script


def _planned(renderer: EmbeddedRenderer, context: DemonstrationContext, index: int, *, wait_s: float) -> PlannedCall:
    history, tools = context.requests[index]
    prompt = renderer.render(history, tools)
    tokens = np.asarray(renderer.encode_reply(context.replies[index], tools), np.int32)
    return PlannedCall(context_key(prompt), tokens.tobytes(), len(prompt), wait_s)


def _delegated(reply: Message) -> str | None:
    """Return the module that a lead's reply delegates, None if it is another reply."""
    call = reply.tool_calls[0] if reply.tool_calls else None
    if call is None or call.name != "delegate":
        return None
    return str(msgspec.json.decode(call.arguments).get("module"))


def _is_end(reply: Message) -> bool:
    return bool(reply.tool_calls) and reply.tool_calls[0].name == "finish"


def _tasks_of(config: Config) -> Iterator[tuple[int | None, str]]:
    """Yield group (None: evaluation) and task id of everything that can be dispatched."""
    task_of = task_source(config)
    for group_id in range(config.run.steps * config.schedule.batch_groups):
        yield group_id, task_of(Kind.TRAIN, group_id).task_id
    for number in range(config.evaluation.tasks):
        yield None, task_of(Kind.EVAL_SAMPLED, number).task_id
