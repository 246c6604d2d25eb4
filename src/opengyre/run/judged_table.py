"""The judged table: figures of regimes that ``opengyre simulate --json`` wrote one by one, put together for a page.

``make regimes`` runs one regime at a time and keeps its figures in a file, so that a long judgement can stop and go on.
"""

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from opengyre.core.errors import FileError, InputError
from opengyre.run.simulate import is_baseline


def read_study(path: Path) -> dict[str, Any]:
    """Return the figures of one regime.

    Raises:
        FileError: The file cannot be read or holds something else.
    """
    try:
        found = msgspec.json.decode(path.read_bytes())
    except (OSError, msgspec.DecodeError) as error:
        raise FileError(f"{path}: {error}; expected what opengyre simulate --json printed for one regime") from error
    if not isinstance(found, dict) or not {"workload", "rules", "best_static"} <= set(found):
        raise FileError(f"{path}: expected what opengyre simulate --json printed for one regime")
    return found


def judged(study: dict[str, Any], rule: str) -> dict[str, Any]:
    """Return where a rule stands in a regime.

    Ratios are hours of the other over hours of the rule: above 1 the rule is faster. ``best`` is the best of the static
    split, colocate and plain waterlevel; its ratio is taken seed by seed, with the lowest and the highest seed.

    Raises:
        InputError: The rule or all baselines are missing.
    """
    rows = {row["rule"]: row for row in study["rules"]}
    baselines = [row for name, row in rows.items() if is_baseline(name)]
    if rule not in rows or not baselines:
        raise InputError(f"{study['workload']}: rules {', '.join(rows)}: expected {rule} and a baseline among them")
    own = rows[rule]
    best = min(baselines, key=lambda row: float(row["hours_per_step"]))
    pairs = zip(best["hours_per_step_by_seed"], own["hours_per_step_by_seed"], strict=True)
    by_seed = [theirs / mine for theirs, mine in pairs]
    static = study["best_static"]
    return {
        "regime": study["workload"],
        "seeds": len(by_seed),
        "hours": own["hours_per_step"],
        "over_split": static["hours_per_step"] / own["hours_per_step"] if static else None,
        "best": best["rule"],
        "over_best": math.exp(sum(map(math.log, by_seed)) / len(by_seed)),
        "over_best_by_seed": (min(by_seed), max(by_seed)),
        "bound": own["bound_ratio"],
        "staleness_max": own["staleness_max"],
    }


def table(studies: Sequence[dict[str, Any]], rule: str) -> str:
    """Return the table of a rule in Markdown, with its summary behind it."""
    rows = [judged(study, rule) for study in studies]
    lines = [
        f"| {rule} | seeds | h/step | x best split | best baseline | x best (seeds) | x bound | max d |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        low, high = row["over_best_by_seed"]
        split = "-" if row["over_split"] is None else f"{row['over_split']:.3f}"
        lines.append(
            f"| {row['regime']} | {row['seeds']} | {row['hours']:.3f} | {split} | {row['best']} | "
            f"{row['over_best']:.3f} ({low:.3f}..{high:.3f}) | {row['bound']:.3f} | {row['staleness_max']} |"
        )
    splits = [math.log(row["over_split"]) for row in rows if row["over_split"] is not None]
    over_split = f"{math.exp(sum(splits) / len(splits)):.3f}" if splits else "-"
    least = min(rows, key=lambda row: row["over_best"])
    bound = sum(row["bound"] for row in rows) / len(rows)
    lines += [
        "",
        f"{rule}, {len(rows)} regimes: {over_split} times the best whole-cell split in the geometric mean, at least "
        f"{least['over_best']:.3f} times the best baseline ({least['regime']}), "
        f"{bound:.3f} times the bound in the mean.",
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    """Print the tables of both elastic rules from the files named."""
    if not arguments:
        sys.stderr.write("judged_table: expected the files that opengyre simulate --json wrote, one a regime\n")
        return 2
    try:
        studies = [read_study(Path(name)) for name in arguments]
        texts = [table(studies, rule) for rule in ("waterlevel", "lookahead")]
    except (FileError, InputError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write("\n\n".join(texts) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
