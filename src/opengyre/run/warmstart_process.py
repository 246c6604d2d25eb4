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
    renderer: EmbeddedRenderer, recipe: WarmStartRecipe, *, seed: int, count: int
) -> list[SupervisedRow]:
    """Return every context of ``count`` executions of the noisy expert."""
    noise = Noise(
        wrong=recipe.wrong,
        missed_function=recipe.missed_function,
        skipped_module=recipe.skipped_module,
        untested=recipe.untested,
        unrepaired=recipe.unrepaired,
        early_finish=recipe.early_finish,
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
    tokenizer: EmbeddedTokenizer, recipe: WarmStartRecipe, rng: random.Random
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
        for _ in range(recipe.batch_tokens // (2 * length + 2)):
            chosen = [rng.choice(names) for _ in range(length)]
            batch.append(([user, *chosen, assistant, *chosen], [0.0] * (length + 2) + [1.0] * length))
        yield batch


def unit_batches(
    renderer: EmbeddedRenderer, recipe: WarmStartRecipe, rng: random.Random
) -> Iterator[list[SupervisedRow]]:
    """Yield batches of unit practice: one module's specification to its code, without noise.

    Choice: under the coder's system prompt, so that the lead does not learn to write code; as many functions in every
    row of a batch, so that little is padded.
    """
    for step in range(recipe.unit_steps):
        count = rng.randint(1, 3) if step > recipe.unit_steps // 4 else 1
        batch: list[SupervisedRow] = []
        used = 0
        while used < recipe.batch_tokens:
            package = make_package(rng, held_out=False, modules=(1, 1), functions=(count, count))
            module, functions = package.modules[0]
            reply = call("write_file", module=module, content="".join(function.code() for function in functions))
            context = renderer.render(sub_head(package, module), words.SUB_TOOLS).tolist()
            output = renderer.encode_reply(reply, words.SUB_TOOLS)
            batch.append(([*context, *output], [0.0] * len(context) + [1.0] * len(output)))
            used += len(context) + len(output)
        yield batch


def main(folder: Path, rank: int) -> int:
    """Train this process's share; rank 0 writes the result and prints ``DONE TOTAL TEXT`` lines."""
    job = msgspec.msgpack.decode((folder / "job.msgpack").read_bytes(), type=WarmStartJob)
    recipe = job.recipe
    torch.set_num_threads(1)
    if recipe.processes > 1:
        store = dist.FileStore(str(folder / "store"), recipe.processes)  # type: ignore[attr-defined]
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=recipe.processes, timeout=timedelta(seconds=300)
        )
    tokenizer = train_tokenizer(recipe.vocabulary)
    renderer = EmbeddedRenderer(tokenizer)
    rng = random.Random(f"warm-start-{job.seed}")
    rows = demonstration_rows(renderer, recipe, seed=job.seed, count=recipe.demonstrations)
    demonstrations = batches_of(rows, tokens=recipe.batch_tokens)
    rng.shuffle(demonstrations)
    steps = recipe.copy_steps + recipe.unit_steps + len(demonstrations)

    def batches() -> Iterator[list[SupervisedRow]]:
        yield from copy_batches(tokenizer, recipe, rng)
        yield from unit_batches(renderer, recipe, rng)
        yield from demonstrations

    def show(done: int, loss: float) -> None:
        stage = "copying" if done <= recipe.copy_steps else "units" if done <= steps - len(demonstrations) else "tasks"
        if rank == 0 and (done % 10 == 0 or done == steps):
            sys.stdout.write(f"{done} {steps} {stage}, loss {loss:.3f}\n")
            sys.stdout.flush()

    config = DecoderConfig(vocab_size=tokenizer.vocab_size, **job.decoder)
    fresh = init_parameters(config, torch.Generator().manual_seed(job.seed))
    settings = SupervisedSettings(learning_rate=recipe.learning_rate, steps=steps)
    trained = train_supervised(config, fresh, batches(), settings, rank=rank, processes=recipe.processes, progress=show)
    if rank == 0:
        tokenizer.save(folder / TOKENIZER)
        write_version(folder / WEIGHTS, config, trained, version=0, incarnation=0)
    if recipe.processes > 1:
        dist.barrier()
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
