"""What a run on emulated cells needs beside its configuration: costs, tokenizer, scripted replies, a first version."""

import itertools
import random
from collections.abc import Iterable, Iterator

import msgspec
import numpy as np

from opengyre.cell.emulated import write_emulated_version
from opengyre.core.config import Config
from opengyre.core.errors import ConfigError
from opengyre.core.types import Kind
from opengyre.engine.emulated import EmulatedCosts, ReplyTable, ScriptedReply, context_key
from opengyre.model.chat import EmbeddedRenderer
from opengyre.model.tokenizer import SPECIALS
from opengyre.run.folder import RunFolder
from opengyre.run.task_source import task_source
from opengyre.run.warmstart import TOKENIZER, WarmStartRecipe
from opengyre.tasks.minirepo.demonstrations import Demonstration, Noise
from opengyre.tasks.minirepo.tasks import minirepo_package, visible_inputs
from opengyre.tasks.minirepo.vocabulary import train_tokenizer

REPLIES = "replies.msgpack"
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
    """Put tokenizer, replies and a version 0 without weights into a new run folder."""
    tokenizer = train_tokenizer(WarmStartRecipe().vocabulary)
    tokenizer.save(folder.path / TOKENIZER)
    table = reply_table(folder.config, EmbeddedRenderer(tokenizer), plain_ids=tokenizer.vocab_size - len(SPECIALS))
    (folder.path / REPLIES).write_bytes(msgspec.msgpack.encode(table))
    write_emulated_version(folder.weights / "v00000-0.safetensors", version=0, incarnation=0)


def reply_table(config: Config, renderer: EmbeddedRenderer, *, plain_ids: int) -> ReplyTable:
    """Return what the noisy expert says on every task that the run can meet, in ``SCRIPTS`` ways each."""
    replies: dict[int, list[ScriptedReply]] = {}
    for split, index in sorted(set(_tasks_of(config))):
        scripts = itertools.islice(_functions(renderer, split, index, seed=config.run.seed), SCRIPTS)
        for script, said in enumerate(scripts):
            for key, tokens in said.items():
                replies.setdefault(key, []).append(ScriptedReply(script, tokens))
    return ReplyTable(replies=replies, end_id=renderer.stop_ids[0], plain_ids=plain_ids, scripts=SCRIPTS)


def _functions(renderer: EmbeddedRenderer, split: str, index: int, *, seed: int) -> Iterator[dict[int, bytes]]:
    """Yield executions of the expert in which the reply is a function of the context, without end.

    Choice: one in which a module is delegated twice and written in two ways is left out, for an engine that sees only
    contexts could not tell the two apart.
    """
    for attempt in itertools.count():
        said: dict[int, bytes] = {}
        calls = played(renderer, split, index, seed=f"{seed}-{attempt}")
        if all(said.setdefault(key, tokens) == tokens for key, tokens in calls):
            yield said


def played(renderer: EmbeddedRenderer, split: str, index: int, *, seed: str) -> Iterator[tuple[int, bytes]]:
    """Yield the context key and the reply, as int32 bytes, of each call of one execution of the expert."""
    rng = random.Random(f"emulated-{split}-{index}-{seed}")
    expert = Demonstration(minirepo_package(split, index), renderer, rng, Noise())
    expert.visible = visible_inputs(split, index)
    for context in expert.run():
        for (history, tools), reply in zip(context.requests, context.replies, strict=True):
            tokens = np.asarray(renderer.encode_reply(reply, tools), np.int32)
            yield context_key(renderer.render(history, tools)), tokens.tobytes()


def _tasks_of(config: Config) -> Iterable[tuple[str, int]]:
    """Yield split and index of every task that can be dispatched."""
    task_of = task_source(config)
    groups = config.run.steps * config.schedule.batch_groups
    evaluated = range(config.evaluation.tasks)
    wanted = [(Kind.TRAIN, group_id) for group_id in range(groups)]
    wanted += [(Kind.EVAL_SAMPLED, group_id) for group_id in evaluated]
    for kind, group_id in wanted:
        _, split, index = task_of(kind, group_id).task_id.split("-")
        yield split, int(index)
