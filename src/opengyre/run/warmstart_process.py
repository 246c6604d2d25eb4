"""One process of the warm start: ``python -m opengyre.run.warmstart_process FOLDER RANK``.

Three stages: dense copying of names, single functions from specification to code, then whole demonstrations.
"""

import random
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from opengyre.core.chat import Message
from opengyre.model.chat import EmbeddedRenderer
from opengyre.model.decoder import DecoderConfig, init_parameters
from opengyre.model.tokenizer import EmbeddedTokenizer
from opengyre.model.warmstart import SupervisedRow, SupervisedSettings, batches_of, train_supervised
from opengyre.model.weights import write_version
from opengyre.run.warmstart import TOKENIZER, WEIGHTS, WarmStartJob, WarmStartRecipe
from opengyre.tasks.minirepo import conversation as words
from opengyre.tasks.minirepo.demonstrations import Demonstration, Noise, call, sub_head
from opengyre.tasks.minirepo.family import DIGITS, FUNCTIONS, MODULES, make_package
from opengyre.tasks.minirepo.vocabulary import train_tokenizer


def demonstration_rows(
    renderer: EmbeddedRenderer, recipe: WarmStartRecipe, *, seed: str, count: int
) -> list[SupervisedRow]:
    """Return every context of ``count`` executions of the noisy expert."""
    noise = Noise(
        wrong=recipe.wrong,
        missed_function=recipe.missed_function,
        skipped_module=recipe.skipped_module,
        untested=recipe.untested,
        unrepaired=recipe.unrepaired,
        early_finish=recipe.early_finish,
        stray=recipe.stray,
        malformed=recipe.malformed,
    )
    rows: list[SupervisedRow] = []
    for index in range(count):
        rng = random.Random(f"demonstration-{seed}-{index}")
        package = make_package(rng, held_out=False)
        for context in Demonstration(package, renderer, rng, noise).run():
            weight = recipe.lead_weight if context.is_lead else 1.0
            rows.append((context.tokens, [weight * is_output for is_output in context.is_output]))
    return rows


def copy_batches(
    tokenizer: EmbeddedTokenizer, recipe: WarmStartRecipe, rng: random.Random, *, tokens: int
) -> Iterator[list[SupervisedRow]]:
    """Yield batches of dense copying: names behind ``<user>`` are repeated behind ``<asst>``.

    Choice: a fresh model of this size forms copying heads in about 200 such steps, and without them learns nothing
    from demonstrations (0.000 held out in a prototype).
    """
    names = [tokenizer.encode(word)[0] for word in (*MODULES, *FUNCTIONS)]
    names += [tokenizer.encode(str(digit))[0] for digit in DIGITS]
    user, assistant = tokenizer.special("<user>"), tokenizer.special("<asst>")
    for _ in range(recipe.copy_steps):
        length = rng.choice((8, 12, 16, 24))
        batch: list[SupervisedRow] = []
        for _ in range(tokens // (2 * length + 2)):
            chosen = [rng.choice(names) for _ in range(length)]
            batch.append(([user, *chosen, assistant, *chosen], [0.0] * (length + 2) + [1.0] * length))
        yield batch


def unit_batches(
    renderer: EmbeddedRenderer, recipe: WarmStartRecipe, rng: random.Random, *, tokens: int
) -> Iterator[list[SupervisedRow]]:
    """Yield batches of unit practice, without noise: a module's specification to its code, or a lead's dialogue.

    Choice: under the prompts of coder and lead, so that neither learns the other's part; as many functions in every
    row of a batch, so that little is padded; one batch in ``lead_every`` is the lead's, who says three tokens a
    turn and would otherwise hardly learn to copy a module's name.
    """
    for step in range(recipe.unit_steps):
        if recipe.lead_every and step % recipe.lead_every == recipe.lead_every - 1:
            yield lead_batch(renderer, rng, tokens=tokens)
            continue
        count = rng.randint(1, 3) if step > recipe.unit_steps // 4 else 1
        batch: list[SupervisedRow] = []
        used = 0
        while used < tokens:
            package = make_package(rng, held_out=False, modules=(1, 1), functions=(count, count))
            module, functions = package.modules[0]
            reply = call("write_file", content="".join(function.code() for function in functions))
            context = renderer.render(sub_head(package, module), words.SUB_TOOLS).tolist()
            output = renderer.encode_reply(reply, words.SUB_TOOLS)
            batch.append(([*context, *output], [0.0] * len(context) + [1.0] * len(output)))
            used += len(context) + len(output)
        yield batch


def lead_batch(renderer: EmbeddedRenderer, rng: random.Random, *, tokens: int) -> list[SupervisedRow]:
    """Return dialogues of leads that delegate every module in order, from the start or from a summary."""
    batch: list[SupervisedRow] = []
    used = 0
    while used < tokens:
        package = make_package(rng, held_out=False, functions=(1, 2))
        names = [name for name, _ in package.modules]
        done = rng.choice((0, 0, *range(1, len(names) + 1)))
        history = [
            Message(role="system", content=words.MAIN_SYSTEM),
            Message(role="user", content=package.instruction()),
        ]
        if done:
            summary = ["built", *names[:done], words.LEFT, *names[done:]]
            history.append(Message(role="user", content=" ".join(summary)))
        row: list[int] = []
        weights: list[float] = []
        for place, name in enumerate((*names[done:], ""), start=done + 1):
            reply = call("delegate", module=name) if name else call("finish", result="done")
            prompt = renderer.render(history, words.MAIN_TOOLS).tolist()
            output = renderer.encode_reply(reply, words.MAIN_TOOLS)
            weights += [0.0] * (len(prompt) - len(row)) + [1.0] * len(output)
            row = [*prompt, *output]
            result = [name, rng.choice(words.STATUS_WORDS), words.LEFT, *names[place:]]
            history += [reply, Message(role="tool", content=" ".join(result))]
        batch.append((row, weights))
        used += len(row)
    return batch


def main(folder: Path, rank: int) -> int:
    """Train this process's part; rank 0 writes the result and prints ``DONE TOTAL TEXT`` lines."""
    job = msgspec.msgpack.decode((folder / "job.msgpack").read_bytes(), type=WarmStartJob)
    recipe = job.recipe
    torch.set_num_threads(1)
    if recipe.processes > 1:
        store = dist.FileStore(str(folder / "store"), recipe.processes)  # type: ignore[attr-defined]
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=recipe.processes, timeout=timedelta(seconds=300)
        )
    tokenizer = train_tokenizer(recipe.vocabulary)
    stages = Stages(EmbeddedRenderer(tokenizer), tokenizer, recipe, seed=job.seed, rank=rank)

    def show(done: int, loss: float) -> None:
        if rank == 0 and (done % 10 == 0 or done == stages.steps):
            sys.stdout.write(f"{done} {stages.steps} {stages.name_of(done)}, loss {loss:.3f}\n")
            sys.stdout.flush()

    config = DecoderConfig(vocab_size=tokenizer.vocab_size, **job.decoder)
    fresh = init_parameters(config, torch.Generator().manual_seed(job.seed))
    settings = SupervisedSettings(learning_rate=recipe.learning_rate, steps=stages.steps)
    trained = train_supervised(config, fresh, stages.batches(), settings, processes=recipe.processes, progress=show)
    if rank == 0:
        tokenizer.save(folder / TOKENIZER)
        write_version(folder / WEIGHTS, config, trained, version=0, incarnation=0)
    if recipe.processes > 1:
        dist.barrier()
        dist.destroy_process_group()
    return 0


class Stages:
    """This process's part of the batches of all stages, in order.

    Args:
        renderer: Chat to tokens.
        tokenizer: The policy's tokenizer.
        recipe: What is practised for how long.
        seed: Of the run.
        rank: This process; each has its own tasks.
    """

    def __init__(
        self,
        renderer: EmbeddedRenderer,
        tokenizer: EmbeddedTokenizer,
        recipe: WarmStartRecipe,
        *,
        seed: int,
        rank: int,
    ) -> None:
        self._renderer, self._tokenizer, self._recipe = renderer, tokenizer, recipe
        self._tokens = max(256, recipe.batch_tokens // recipe.processes)
        self._rng = random.Random(f"warm-start-{seed}-{rank}")
        count = max(1, recipe.demonstrations // recipe.processes)
        rows = demonstration_rows(renderer, recipe, seed=f"{seed}-{rank}", count=count)
        demonstrations = batches_of(rows, tokens=self._tokens)
        self._rng.shuffle(demonstrations)
        common = torch.tensor(len(demonstrations))
        if recipe.processes > 1:
            dist.all_reduce(common, dist.ReduceOp.MIN)
        self._demonstrations = demonstrations[: int(common)]

    @property
    def steps(self) -> int:
        """Optimizer steps of all stages."""
        return self._recipe.copy_steps + self._recipe.unit_steps + len(self._demonstrations)

    def name_of(self, step: int) -> str:
        """Return the stage of a step."""
        if step <= self._recipe.copy_steps:
            return "copying"
        return "units" if step <= self._recipe.copy_steps + self._recipe.unit_steps else "tasks"

    def batches(self) -> Iterator[list[SupervisedRow]]:
        """Yield every batch."""
        yield from copy_batches(self._tokenizer, self._recipe, self._rng, tokens=self._tokens)
        yield from unit_batches(self._renderer, self._recipe, self._rng, tokens=self._tokens)
        yield from self._demonstrations


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
