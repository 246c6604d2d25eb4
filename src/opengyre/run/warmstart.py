"""Make (or find in the cache) the embedded policy that a run starts from."""

import argparse
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta
from rich.progress import Progress

from opengyre.core.config import Config, load_config
from opengyre.core.errors import ConfigError, RunError
from opengyre.report.console import console

RECIPE_VERSION = 16
"""Raised whenever the code behind the recipe changes what it makes."""
WEIGHTS = "weights.safetensors"
TOKENIZER = "tokenizer.json"
_Share = Annotated[float, Meta(ge=0, le=1)]


class WarmStartRecipe(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the warm start does; overridden by the table ``policy.warm_start``.

    Example: ``WarmStartRecipe(demonstrations=1200)``.
    """

    vocabulary: Annotated[int, Meta(ge=300)] = 836
    demonstrations: Annotated[int, Meta(ge=1)] = 1200
    copy_steps: Annotated[int, Meta(ge=0)] = 100
    unit_steps: Annotated[int, Meta(ge=0)] = 720
    lead_every: Annotated[int, Meta(ge=0)] = 3
    """One unit step in so many is the lead's; 0: none."""
    batch_tokens: Annotated[int, Meta(ge=256)] = 1024
    learning_rate: Annotated[float, Meta(gt=0)] = 1.3e-3
    processes: Annotated[int, Meta(ge=1)] = 2
    lead_weight: Annotated[float, Meta(gt=0)] = 2.0
    """Weight of the lead's tokens: it says little, and what it says decides everything."""
    wrong: _Share = 0.22
    missed_function: _Share = 0.10
    skipped_module: _Share = 0.12
    untested: _Share = 0.45
    unrepaired: _Share = 0.50
    early_finish: _Share = 0.06
    stray: _Share = 0.08
    malformed: _Share = 0.04


class WarmStartJob(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that decides the result; its hash is the name in the cache."""

    recipe: WarmStartRecipe
    decoder: dict[str, int]
    seed: int
    version: int = RECIPE_VERSION


def job_of(config: Config) -> WarmStartJob:
    """Return the warm start that a configuration asks for.

    Raises:
        ConfigError: A key of ``policy.warm_start`` is unknown or out of range.
    """
    try:
        recipe = msgspec.convert(config.policy.warm_start, WarmStartRecipe, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"policy.warm_start: {error}") from error
    policy = config.policy
    decoder = {
        "hidden_size": policy.hidden_size,
        "layers": policy.layers,
        "heads": policy.heads,
        "kv_heads": policy.kv_heads,
        "mlp_size": policy.mlp_size,
        "context_tokens": policy.context_tokens,
    }
    return WarmStartJob(recipe=recipe, decoder=decoder, seed=config.run.seed)


def cache_folder(job: WarmStartJob) -> Path:
    """Return where the result of a job lies or will lie."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    name = hashlib.blake2s(msgspec.json.encode(job, order="sorted"), digest_size=10).hexdigest()
    return root / "opengyre" / "warmstart" / name


def ensure_warm_start(config: Config, *, progress: Callable[[int, int, str], None] | None = None) -> Path:
    """Return the folder with tokenizer and weights, made now if it is not in the cache.

    Args:
        config: Decides recipe, shape and seed.
        progress: Called with steps done, steps in all, and a text.

    Raises:
        RunError: A training process failed.
    """
    job = job_of(config)
    target = cache_folder(job)
    if (target / WEIGHTS).exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / f"{target.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (target / WEIGHTS).exists():
            return target
        scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
        try:
            _train(job, scratch, progress)
            (scratch / "job.json").write_bytes(msgspec.json.format(msgspec.json.encode(job)))
            shutil.rmtree(target, ignore_errors=True)
            scratch.replace(target)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return target


def _train(job: WarmStartJob, folder: Path, progress: Callable[[int, int, str], None] | None) -> None:
    """Run the training processes; the first one prints its progress."""
    (folder / "job.msgpack").write_bytes(msgspec.msgpack.encode(job))
    environment = dict(os.environ, OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "opengyre.run.warmstart_process", str(folder), str(rank)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
            env=environment,
            text=True,
        )
        for rank in range(job.recipe.processes)
    ]
    try:
        for line in processes[0].stdout or ():
            done, total, text = line.rstrip("\n").split(" ", 2)
            if progress is not None:
                progress(int(done), int(total), text)
        codes = [process.wait() for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
    if any(codes):
        raise RunError(f"warm start: the training processes ended with {codes}, expected zeros")


def shown_progress(config: Config) -> Path:
    """Return ``ensure_warm_start`` under a progress bar."""
    with Progress(console=console(), transient=True) as bar:
        task = bar.add_task("warm start", total=None)

        def show(done: int, total: int, text: str) -> None:
            bar.update(task, completed=done, total=total, description=f"warm start: {text}")

        return ensure_warm_start(config, progress=show)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    parser.add_argument("config", type=Path, metavar="CONFIG.toml")
    parser.add_argument("--set", action="append", default=[], metavar="key=value", help="override a key")


def main(arguments: argparse.Namespace) -> int:
    """Make the warm start and print its folder."""
    config = load_config(arguments.config, arguments.set)
    console().print(str(shown_progress(config)), highlight=False, soft_wrap=True)
    return 0
