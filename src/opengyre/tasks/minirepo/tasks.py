"""minirepo packages as tasks: instruction, visible tests, hidden tests, frozen test ids."""

import random
from collections.abc import Iterator

from opengyre.core.errors import InputError
from opengyre.core.types import Task
from opengyre.tasks.minirepo.family import VISIBLE_INPUTS, Function, Package, Values, make_package, random_inputs

GRADER = "minirepo-1"
HIDDEN_INPUTS = 8
_SPLITS = {"train": (30_000, False), "heldout": (10_000, True)}


def minirepo_package(split: str, index: int) -> Package:
    """Return the package behind a task.

    Raises:
        InputError: The split is neither ``train`` nor ``heldout``.
    """
    if split not in _SPLITS:
        raise InputError(f"minirepo split {split!r}: expected one of {', '.join(_SPLITS)}")
    first, held_out = _SPLITS[split]
    return make_package(random.Random(2 * (first + index) + held_out), held_out=held_out)


def minirepo_task(split: str, index: int) -> Task:
    """Return a task of a split; the same arguments give the same task everywhere.

    >>> task = minirepo_task("train", 0)
    >>> task.instruction.startswith("modules ") and len(task.test_ids) >= 6
    True
    """
    package = minirepo_package(split, index)
    files = {"TASK.md": package.instruction()}
    hidden: dict[str, str] = {}
    test_ids: list[str] = []
    for module, functions, visible, unseen in _drawn_inputs(split, index):
        files[f"test_{module}.py"] = test_file(module, functions, visible)
        hidden[f"hidden_{module}.py"] = test_file(module, functions, unseen)
        test_ids += [f"{module}::{function.name}" for function in functions]
    return Task(
        task_id=f"minirepo-{split}-{index}",
        format="minirepo",
        instruction=package.instruction(),
        files=files,
        hidden_files=hidden,
        test_ids=tuple(test_ids),
        artifact=tuple(f"{module}.py" for module, _ in package.modules),
        grader=GRADER,
        scoring_limit_s=20.0,
    )


def visible_inputs(split: str, index: int) -> dict[str, list[Values]]:
    """Return the inputs of a task's visible tests, by function."""
    found: dict[str, list[Values]] = {}
    for _, _, visible, _ in _drawn_inputs(split, index):
        found |= visible
    return found


Inputs = dict[str, list[Values]]
"""Function to inputs."""


def _drawn_inputs(split: str, index: int) -> Iterator[tuple[str, tuple[Function, ...], Inputs, Inputs]]:
    """Yield each module with its functions, their visible and their hidden inputs."""
    rng = random.Random(f"minirepo-{split}-{index}")
    for module, functions in minirepo_package(split, index).modules:
        visible = {function.name: random_inputs(rng, VISIBLE_INPUTS) for function in functions}
        unseen = {function.name: _hidden_inputs(rng, function, visible[function.name]) for function in functions}
        yield module, functions, visible, unseen


def reference_files(package: Package) -> dict[str, str]:
    """Return the modules of a solution that passes every test."""
    return {f"{module}.py": "".join(function.code() for function in functions) for module, functions in package.modules}


def _hidden_inputs(rng: random.Random, function: Function, visible: list[Values]) -> list[Values]:
    """Return inputs that no constant answers: at least two results differ whenever the function allows it."""
    for _ in range(20):
        chosen = [values for values in random_inputs(rng, HIDDEN_INPUTS + 2) if values not in visible][:HIDDEN_INPUTS]
        if len({repr(function.compute(values)) for values in chosen}) > 1:
            break
    return chosen


def test_file(module: str, functions: tuple[Function, ...], inputs: dict[str, list[Values]]) -> str:
    """Return the source of a test file: one test a function, one assertion an input."""
    lines = [f"from {module} import *"]
    for function in functions:
        lines += ["", "", f"def test_{function.name}():"]
        lines += [
            f"    assert {function.name}({values!r}) == {function.compute(values)!r}"
            for values in inputs[function.name]
        ]
    return "\n".join(lines) + "\n"
