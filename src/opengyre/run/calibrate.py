"""`opengyre simulate --calibrate RUN`: costs and executions of a simulated workload from what a live run measured."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import msgspec

from opengyre.report.console import console, plain_table
from opengyre.run.build import schedule_settings
from opengyre.run.recorded import Recorded, read_recorded
from opengyre.sim.fit import DecodeFit, fit_decode
from opengyre.sim.simulator import Simulator
from opengyre.sim.workload import CELL_GPUS, Workload


@dataclass(frozen=True)
class Cost:
    """A fitted cost.

    Example: ``Cost("train_token_s", 7.6e-5, 320, 0.04)``.
    """

    key: str
    """Of the workload."""
    value: float
    samples: int
    error: float | None
    """Median of |fitted - measured| / measured over the samples; None where there is none."""


@dataclass(frozen=True)
class Calibration:
    """A run as a workload.

    Example: ``calibrate(Path("runs/first")).workload``.
    """

    run: str
    recorded: Recorded
    costs: tuple[Cost, ...]
    workload: Workload
    """Costs, sizes and executions of the run."""
    decode: DecodeFit
    simulated_s: float
    """The run's own rule on it, from the first publication to the last step."""

    @property
    def measured_s(self) -> float:
        """What that took."""
        return self.recorded.times.ended_s - self.recorded.times.started_s

    def applied_to(self, workload: Workload) -> Workload:
        """Return another workload with the fitted costs."""
        return _with_costs(workload, self.costs)


def calibrate(folder: Path) -> Calibration:
    """Fit the costs of a simulated cell to a run, and simulate the run's own rule with them.

    Choice: the prefill of what tools answer belongs to a decode step here, as the workload has it: its measured cost a
    sampled token is added to ``step_request_s``.

    Raises:
        FileError: The folder holds no run.
        InputError: It did not train, or too few calls were served by one cell.
    """
    recorded = read_recorded(folder)
    decode = fit_decode(recorded.calls)
    costs = tuple(_costs(recorded, decode))
    workload = _workload(recorded, costs)
    return Calibration(folder.name, recorded, costs, workload, decode, _own_run_s(recorded, workload))


def _costs(recorded: Recorded, decode: DecodeFit) -> Iterator[Cost]:
    calls, error = decode.calls, decode.median_error
    outputs = sum(each.output_tokens for each in recorded.calls)
    prefill_s = decode.prefill_token_s * sum(each.new_tokens for each in recorded.calls) / outputs
    yield Cost("step_weights_s", decode.weights_s, calls, error)
    yield Cost("step_request_s", decode.request_s + prefill_s, calls, error)
    yield Cost("step_context_token_s", decode.context_token_s, calls, error)
    yield Cost("prefill_token_s", decode.prefill_token_s, calls, error)
    micro_steps = list(recorded.times.micro_steps.values())
    rate = sum(seconds for _, seconds in micro_steps) / max(1, sum(tokens for tokens, _ in micro_steps))
    errors = [abs(tokens * rate / seconds - 1) for tokens, seconds in micro_steps if seconds]
    yield Cost("train_token_s", rate, len(micro_steps), median(errors) if errors else None)
    yield _mean_cost("optimizer_s", recorded.times.optimizer_s)
    yield _mean_cost("publish_s", recorded.publish_s)
    yield _mean_cost("switch_s", recorded.switch_s)
    yield _mean_cost("evaluate_s", recorded.evaluate_s)


def _mean_cost(key: str, values: Sequence[float]) -> Cost:
    """Return a cost as the mean of what was measured; what a run never did costs nothing here."""
    if not values:
        return Cost(key, 0.0, 0, None)
    mean = fmean(values)
    return Cost(key, mean, len(values), median(abs(mean / value - 1) for value in values if value))


def _workload(recorded: Recorded, costs: Sequence[Cost]) -> Workload:
    """Return the run as a workload: a cell of the run is one of 8 GPUs at load 1, for the costs are its own."""
    config, times = recorded.config, recorded.times
    tokens = [tokens for tokens, _ in times.micro_steps.values()]
    groups = times.steps * config.schedule.batch_groups
    sampled = sum(call.output_tokens for session in recorded.sessions for call in session)
    per_group = sampled / (len(recorded.sessions) / config.schedule.group_size)
    sizes = Workload(
        cells=config.cells.count,
        gpus=config.cells.count * CELL_GPUS,
        batch_groups=config.schedule.batch_groups,
        group_size=config.schedule.group_size,
        phi=config.schedule.overlap,
        mu=config.schedule.burst,
        load=1.0,
        steps=times.steps,
        kv_tokens_per_cell=config.cells.kv_tokens,
        trained_tokens_per_output=sum(tokens) / groups / per_group,
        micro_step_tokens=max(1.0, fmean(tokens)) if tokens else 1.0,
        context_low_tokens=0.0,
        context_high_tokens=0.0,
        trace_in_order=True,
    )
    return _with_costs(sizes, costs)


def _with_costs(workload: Workload, costs: Sequence[Cost]) -> Workload:
    return msgspec.structs.replace(workload, **{cost.key: cost.value for cost in costs})


def _own_run_s(recorded: Recorded, workload: Workload) -> float:
    settings = replace(schedule_settings(recorded.config), steps=workload.steps, evaluate_at=(), evaluation_tasks=0)
    run = Simulator(workload, settings, name=settings.rule, seed=0, sessions=recorded.sessions).run()
    return run.step_done_s[-1]


# -- what is shown ----------------------------------------------------------------------------------------------


def calibration_json(one: Calibration) -> dict[str, Any]:
    """Return a calibration as the JSON shows it."""
    return {
        "run": one.run,
        "rule": one.recorded.config.schedule.rule,
        "costs": [msgspec.to_builtins(cost) for cost in one.costs],
        "calls_total_ratio": one.decode.total_ratio,
        "measured_s": one.measured_s,
        "simulated_s": one.simulated_s,
        "ratio": one.simulated_s / one.measured_s,
    }


def show_calibration(one: Calibration) -> None:
    """Print the fitted costs with their errors, and the run itself beside its simulation."""
    title = f"costs of a cell of {one.run}"
    table = plain_table(title, ("key", "seconds", "samples", "median error"), left=("key",), gap=1)
    for cost in one.costs:
        error = "-" if cost.error is None else f"{cost.error:.0%}"
        table.add_row(cost.key, f"{cost.value:.3g}", str(cost.samples), error)
    console().print(table)
    schedule, times = one.recorded.config.schedule, one.recorded.times
    ratio = one.simulated_s / one.measured_s
    console().print(
        f"{schedule.rule}, {times.steps} steps: {one.measured_s:.1f} s measured, {one.simulated_s:.1f} s simulated, "
        f"ratio {ratio:.3f}. All calls together: {one.decode.total_ratio:.3f} of their measured time.",
        highlight=False,
    )
    if one.recorded.config.evaluation.tasks:
        console().print("The run's evaluations are in what was measured and are not simulated.", highlight=False)
