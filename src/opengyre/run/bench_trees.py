"""Measures the trajectory processor on executions of known shape; ``opengyre bench trees`` prints it.

The shapes are those of the design's budgets. Every time is the median of several runs on arrays that exist already.
"""

import random
import statistics
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np

from opengyre.core.chat import Message, Tool, ToolCall
from opengyre.core.types import Int32Array, Role, VersionRun
from opengyre.trajectory.admission import admit
from opengyre.trajectory.match import PathIndex
from opengyre.trajectory.roles import RoleTracker
from opengyre.trajectory.rows import rows_of
from opengyre.trajectory.serial import tree_to_bytes
from opengyre.trajectory.tree import TrajectoryTree, TreeCall

Result = dict[str, Any]
VOCABULARY = 150_000


def run() -> list[Result]:
    """Return the measurements: case, value, unit."""
    return [*_agents(), *_one_path(), *_group(), *_match()]


def make_execution(*, main: int = 120, sub_agents: int = 3, sub_calls: int = 25, seed: int = 0) -> list[TreeCall]:
    """Return the calls of an execution with compactions and interleaved sub-agents, contexts whole.

    Example: the defaults give 195 calls with 2,611,200 summed and 119,550 unique tokens: a main agent whose history is
    compacted before calls 40 and 80, three sub-agents from calls 10, 40 and 70 on, outputs of 120 tokens, observations
    of 350, system prompts of 6,000 and 3,000.
    """
    generator = random.Random(seed)

    def fresh(count: int) -> list[int]:
        return [generator.randrange(VOCABULARY) for _ in range(count)]

    contexts = {"main": fresh(6000)} | {f"sub{index}": [] for index in range(sub_agents)}
    for index in range(sub_agents):
        contexts[f"sub{index}"] = fresh(3000)
    left = {f"sub{index}": sub_calls for index in range(sub_agents)}
    calls: list[TreeCall] = []

    def call(agent: str) -> None:
        output = fresh(120)
        calls.append(make_call(len(calls), agent, np.array(contexts[agent], np.int32), np.array(output, np.int32)))
        contexts[agent] = contexts[agent] + output + fresh(350)

    for index in range(main):
        if index in (40, 80):
            contexts["main"] = fresh(7500)
        call("main")
        for number in range(sub_agents):
            agent = f"sub{number}"
            if index >= 10 + 30 * number and left[agent]:
                left[agent] -= 1
                call(agent)
    return calls


def make_call(number: int, agent: str, context: Int32Array, output: Int32Array) -> TreeCall:
    """Return a call with logprobs of -1."""
    return TreeCall(
        call_id=f"c{number:05d}",
        request_id=f"r{number:05d}",
        agent=agent,
        role=Role.MAIN if agent == "main" else Role.SUB_AGENT,
        context=context,
        output=output,
        logprobs=np.full(len(output), -1, np.float32),
        versions=(VersionRun(0, len(output)),),
    )


def build(calls: list[TreeCall]) -> TrajectoryTree:
    """Return the tree of some calls."""
    tree = TrajectoryTree("bench")
    for call in calls:
        tree.insert(call)
    return tree


def _median_s(work: Callable[[], object], repeats: int = 7) -> float:
    times = []
    for _ in range(repeats):
        started_s = time.perf_counter()
        work()
        times.append(time.perf_counter() - started_s)
    return statistics.median(times)


def _peak_bytes(work: Callable[[], object]) -> tuple[int, int]:
    """Return the bytes that the result of some work holds, and the peak while it ran."""
    tracemalloc.start()
    kept = work()
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    del kept
    return held, peak


def _agents() -> list[Result]:
    calls = make_execution()
    tree = build(calls)
    admitted = admit(tree, max_leaves=5, seed=0)
    lists = [(call.context.tolist(), call.output.tolist()) for call in calls]
    held, _ = _peak_bytes(lambda: build(calls))
    case = f"{len(calls)} calls, {tree.summed_tokens:,} summed, {tree.unique_tokens:,} unique tokens"
    converted_s = _median_s(lambda: [(np.array(one, np.int32), np.array(other, np.int32)) for one, other in lists], 3)
    return [
        {"case": f"{case}: build and admit", "value": 1e3 * _median_s(lambda: _build_and_admit(calls)), "unit": "ms"},
        {"case": "the same: memory of the tree", "value": held / tree.unique_tokens, "unit": "bytes/unique token"},
        {
            "case": "the same: rows of 5 leaves",
            "value": 1e3 * _median_s(lambda: rows_of(tree, admitted, advantage=1.0)),
            "unit": "ms",
        },
        {"case": "the same: serialise", "value": 1e3 * _median_s(lambda: tree_to_bytes(tree)), "unit": "ms"},
        {"case": "the same: lists to arrays first", "value": 1e3 * converted_s, "unit": "ms"},
    ]


def _build_and_admit(calls: list[TreeCall]) -> object:
    return admit(build(calls), max_leaves=5, seed=0)


def _one_path() -> list[Result]:
    path = np.random.default_rng(0).integers(0, VOCABULARY, 1_000_000, dtype=np.int32)
    ends = [(number + 1) * 1000 for number in range(1000)]
    calls = [make_call(number, "main", path[: end - 200], path[end - 200 : end]) for number, end in enumerate(ends)]
    _, peak = _peak_bytes(lambda: build(calls))
    return [
        {
            "case": "1,000 calls on a path of 1,000,000 tokens",
            "value": _median_s(lambda: _build_and_admit(calls), 3),
            "unit": "s",
        },
        {"case": "the same: peak memory beside the calls", "value": peak / 1e6, "unit": "MB"},
    ]


def _group() -> list[Result]:
    """16 executions of 200 calls and 500,000 unique tokens each."""
    path = np.random.default_rng(1).integers(0, VOCABULARY, 500_000, dtype=np.int32)
    ends = [(number + 1) * 2500 for number in range(200)]
    calls = [make_call(number, "main", path[: end - 300], path[end - 300 : end]) for number, end in enumerate(ends)]

    def work() -> None:
        for _ in range(16):
            tree = build(calls)
            rows_of(tree, admit(tree, max_leaves=5, seed=0), advantage=1.0)

    case = "group of 16 executions, 200 calls and 500,000 tokens each: build, admit, rows"
    return [{"case": case, "value": _median_s(work, 3), "unit": "s"}]


def _match() -> list[Result]:
    index, tracker, history = PathIndex(), RoleTracker(), [Message(role="system", content="x" * 20_000)]
    tools = [Tool(name="shell")]
    for number in range(200):
        history.append(Message(role="tool" if number else "user", content="x" * 2400 + str(number)))
        match = index.match(history, tools)
        call = ToolCall(id=f"call_{number}", name="shell", arguments=f'{{"command":"{number}"}}')
        reply = Message(role="assistant", content="next", tool_calls=(call,))
        index.add(f"c{number}", match.keys, reply)
        tracker.observe(f"c{number}", history, tools)
        tracker.answered(f"c{number}", reply)
        history.append(reply)
    fresh = iter(range(10**6))
    matched_s = _median_s(lambda: index.match(history, tools), 21)
    judged_s = _median_s(lambda: tracker.observe(f"again{next(fresh)}", history, tools), 21)
    case = "a history of 400 messages and 500 kB that extends its stored path"
    return [
        {"case": f"{case}: match", "value": 1e3 * matched_s, "unit": "ms"},
        {"case": "the same: role", "value": 1e3 * judged_s, "unit": "ms"},
    ]
