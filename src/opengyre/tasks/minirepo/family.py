"""The family: names, list steps and results, their wordings, their code, and what they compute.

A function takes a list of integers, applies two list steps and returns a result. The triple (step, step, result)
decides the split: held-out triples are never in training tasks, demonstrations or practice, though their parts are.
"""

import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass

_MODULES = """
    amber birch cedar delta ember flint grove haven indigo jasper kappa lotus maple north ocean pearl quartz river
    slate thorn
"""
_FUNCTIONS = """
    bake calm dash etch fold gaze hush iron jolt knit lift mend nudge open pack quiz rest sift tune urge vary wash yoke
    zoom bind carve drift equip frame grind hatch index judge knock limit merge nest orbit plant quote hoist solve
    trace unite
"""
MODULES = tuple(_MODULES.split())
FUNCTIONS = tuple(_FUNCTIONS.split())
DIGITS = (2, 3, 4, 5)
VISIBLE_INPUTS = 3
"""Inputs of a function in its visible test."""
HELD_OUT_SHARE = 5
"""One triple in so many is held out."""

Values = list[int]


@dataclass(frozen=True)
class Step:
    """A list step or a result: two wordings, one line of code, what it computes.

    Example: ``STEPS["add"].code`` is ``v = [x + {k} for x in v]``.
    """

    wordings: tuple[str, str]
    code: str
    compute: Callable[[Values, int], Values | int]

    @property
    def takes_digit(self) -> bool:
        """Whether the step has a digit."""
        return "{k}" in self.code


STEPS: dict[str, Step] = {
    "add": Step(
        ("add {k} to each", "raise every item by {k}"), "v = [x + {k} for x in v]", lambda v, k: [x + k for x in v]
    ),
    "sub": Step(
        ("subtract {k} from each", "lower every item by {k}"),
        "v = [x - {k} for x in v]",
        lambda v, k: [x - k for x in v],
    ),
    "mul": Step(
        ("multiply each by {k}", "scale every item by {k}"), "v = [x * {k} for x in v]", lambda v, k: [x * k for x in v]
    ),
    "mod": Step(
        ("take each modulo {k}", "reduce every item modulo {k}"),
        "v = [x % {k} for x in v]",
        lambda v, k: [x % k for x in v],
    ),
    "square": Step(
        ("square each", "multiply every item by itself"), "v = [x * x for x in v]", lambda v, k: [x * x for x in v]
    ),
    "negate": Step(("negate each", "flip the sign of every item"), "v = [-x for x in v]", lambda v, k: [-x for x in v]),
    "absolute": Step(
        ("take the absolute value of each", "drop the sign of every item"),
        "v = [abs(x) for x in v]",
        lambda v, k: [abs(x) for x in v],
    ),
    "even": Step(
        ("keep even items", "remove odd items"),
        "v = [x for x in v if x % 2 == 0]",
        lambda v, k: [x for x in v if x % 2 == 0],
    ),
    "odd": Step(
        ("keep odd items", "remove even items"),
        "v = [x for x in v if x % 2 == 1]",
        lambda v, k: [x for x in v if x % 2 == 1],
    ),
    "positive": Step(
        ("keep positive items", "remove items of zero or less"),
        "v = [x for x in v if x > 0]",
        lambda v, k: [x for x in v if x > 0],
    ),
    "above": Step(
        ("keep items above {k}", "remove items up to {k}"),
        "v = [x for x in v if x > {k}]",
        lambda v, k: [x for x in v if x > k],
    ),
    "below": Step(
        ("keep items below {k}", "remove items from {k} up"),
        "v = [x for x in v if x < {k}]",
        lambda v, k: [x for x in v if x < k],
    ),
    "reverse": Step(("reverse the order", "turn the list around"), "v = v[::-1]", lambda v, k: v[::-1]),
    "sort": Step(("sort upward", "order from small to large"), "v = sorted(v)", lambda v, k: sorted(v)),
    "sort_down": Step(
        ("sort downward", "order from large to small"), "v = sorted(v)[::-1]", lambda v, k: sorted(v)[::-1]
    ),
    "take": Step(("keep the first {k}", "cut the list to {k} items"), "v = v[:{k}]", lambda v, k: v[:k]),
    "skip": Step(("skip the first {k}", "drop {k} items from the front"), "v = v[{k}:]", lambda v, k: v[k:]),
    "unique": Step(
        ("remove repeats", "keep one copy of each"), "v = list(dict.fromkeys(v))", lambda v, k: list(dict.fromkeys(v))
    ),
}
RESULTS: dict[str, Step] = {
    "sum": Step(("return the sum", "give the total"), "return sum(v)", lambda v, k: sum(v)),
    "max": Step(
        ("return the largest or 0", "give the maximum or 0"),
        "return max(v, default=0)",
        lambda v, k: max(v, default=0),
    ),
    "min": Step(
        ("return the smallest or 0", "give the minimum or 0"),
        "return min(v, default=0)",
        lambda v, k: min(v, default=0),
    ),
    "count": Step(("return how many remain", "give the count"), "return len(v)", lambda v, k: len(v)),
    "list": Step(("return the list", "give the items"), "return v", lambda v, k: v),
    "last": Step(
        ("return the last one item list", "give a list of the final item"), "return v[-1:]", lambda v, k: v[-1:]
    ),
}


@dataclass(frozen=True)
class Function:
    """One function of a specification.

    >>> f = Function("zoom", (("mod", 4), ("even", 2)), "sum", 0)
    >>> f.line()
    '- zoom: take each modulo 4, then keep even items, then return the sum'
    >>> f.compute([5, 6, 8])
    2
    """

    name: str
    steps: tuple[tuple[str, int], ...]
    result: str
    wording: int
    """Bits that choose the wording of each step and of the result."""

    def phrases(self) -> list[str]:
        """Return the wording of each list step."""
        return [
            STEPS[step].wordings[(self.wording >> index) & 1].format(k=digit)
            for index, (step, digit) in enumerate(self.steps)
        ]

    def last_phrase(self) -> str:
        """Return the wording of the result."""
        return RESULTS[self.result].wordings[(self.wording >> 2) & 1]

    def line(self) -> str:
        """Return the function's line of the specification."""
        return f"- {self.name}: {', then '.join([*self.phrases(), self.last_phrase()])}"

    def code(self, steps: tuple[tuple[str, int], ...] | None = None, result: str | None = None) -> str:
        """Return Python source; each code line stands under a comment that repeats its phrase.

        Choice: a small model copies the phrase first and then translates it from the line above.
        """
        lines = [f"def {self.name}(v):"]
        for phrase, (step, digit) in zip(self.phrases(), steps or self.steps, strict=True):
            lines += [f"    # {phrase}", f"    {STEPS[step].code.format(k=digit)}"]
        lines += [f"    # {self.last_phrase()}", f"    {RESULTS[result or self.result].code}"]
        return "\n".join(lines) + "\n"

    def compute(self, values: Values) -> Values | int:
        """Return what the function gives for a list."""
        current: Values | int = list(values)
        for step, digit in self.steps:
            current = STEPS[step].compute(current, digit)  # type: ignore[arg-type]
        return RESULTS[self.result].compute(current, 0)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Package:
    """The specification of one package: modules in order, each with its functions.

    Example: ``Package((("amber", (f, g)),))`` has the instruction ``modules amber``, then its section: ``module amber``
    and a line for f and one for g.
    """

    modules: tuple[tuple[str, tuple[Function, ...]], ...]

    def section(self, module: str) -> str:
        """Return the part of the instruction that belongs to a module."""
        return "\n".join([f"module {module}", *(function.line() for function in self.functions(module))]) + "\n"

    def instruction(self) -> str:
        """Return the whole specification: the list of modules, then a section each.

        Choice: the list stands at the head, so that the next module is the neighbour of the last one: without it the
        small policy asked for modules that do not exist, and learning to avoid that spoilt the rest.
        """
        names = " ".join(name for name, _ in self.modules)
        return f"modules {names}\n" + "".join(self.section(name) for name, _ in self.modules)

    def functions(self, module: str) -> tuple[Function, ...]:
        """Return the functions of a module.

        Raises:
            KeyError: There is no such module.
        """
        return dict(self.modules)[module]


def random_inputs(rng: random.Random, count: int) -> list[Values]:
    """Return random lists to test a function on."""
    return [[rng.randint(-9, 12) for _ in range(rng.randint(5, 9))] for _ in range(count)]


def is_held_out(steps: tuple[tuple[str, int], ...], result: str) -> bool:
    """Whether a triple of kinds belongs to the held-out split.

    >>> is_held_out((("mod", 4), ("even", 2)), "sum") == is_held_out((("mod", 2), ("even", 5)), "sum")
    True
    """
    kinds = "|".join([*(step for step, _ in steps), result])
    return zlib.crc32(kinds.encode()) % HELD_OUT_SHARE == 0


def make_package(
    rng: random.Random,
    *,
    held_out: bool,
    modules: tuple[int, int] = (3, 4),
    functions: tuple[int, int] = (2, 3),
) -> Package:
    """Return a random package of one split.

    Args:
        rng: Source of all choices.
        held_out: Split of every function.
        modules: Smallest and largest number of modules.
        functions: Smallest and largest number of functions a module.
    """
    names = rng.sample(FUNCTIONS, modules[1] * functions[1])
    made = []
    for module in rng.sample(MODULES, rng.randint(*modules)):
        chosen = [_function(rng, names.pop(), held_out) for _ in range(rng.randint(*functions))]
        made.append((module, tuple(chosen)))
    return Package(tuple(made))


def _function(rng: random.Random, name: str, held_out: bool) -> Function:
    kinds, results = list(STEPS), list(RESULTS)
    while True:
        steps = tuple((kind, rng.choice(DIGITS)) for kind in rng.sample(kinds, 2))
        result = rng.choice(results)
        if is_held_out(steps, result) == held_out:
            return Function(name, steps, result, rng.randrange(8))
