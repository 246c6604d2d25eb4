"""Measure the reference engine: decoding against a bare padded loop, prefix cache, hand-over; three model sizes."""

import gc
import tempfile
import time
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from opengyre.core.cells import HandedOver
from opengyre.core.protocols import GenerateRequest
from opengyre.engine.moved import take_moved
from opengyre.engine.torch_engine import CachedEngine, TorchEngine
from opengyre.model.decoder import DecoderConfig, KeyValueCache, Parameters, forward_cached, init_parameters

CONTEXT = 64


@dataclass(frozen=True, kw_only=True)
class Case:
    """A shape and how much is done with it; weights are random, for speed does not depend on them.

    Example: ``CASES["3M"].batches`` is (1, 8, 16, 32).
    """

    config: DecoderConfig
    batches: tuple[int, ...] = (1, 8, 16, 32)
    length: int = 96
    """Tokens that each call samples."""
    repeats: int = 3
    is_small: bool = True
    """Whether prefill and hand-over are measured too."""


CASES = {
    "0.7M": Case(config=DecoderConfig(vocab_size=676, hidden_size=128, layers=4, heads=4, kv_heads=2, mlp_size=256)),
    "3M": Case(config=DecoderConfig(vocab_size=2048, hidden_size=192, layers=6, heads=6, kv_heads=2, mlp_size=512)),
    "135M": Case(
        config=DecoderConfig(
            vocab_size=49152,
            hidden_size=576,
            layers=30,
            heads=9,
            kv_heads=3,
            mlp_size=1536,
            rope_theta=100_000.0,
            context_tokens=512,
        ),
        batches=(1, 8, 16),
        length=12,
        is_small=False,
    ),
}
"""The last one has the shape of SmolLM2-135M."""


def run() -> list[dict[str, Any]]:
    """Return one result for each case: case, value, unit."""
    torch.set_num_threads(1)
    results: list[dict[str, Any]] = []
    for name, case in CASES.items():
        config = case.config
        parameters = init_parameters(config, torch.Generator().manual_seed(0))
        for batch in case.batches:
            results += _decoding(name, case, parameters, batch)
        if case.is_small:
            results += _prefill(name, config, parameters)
            results += _hand_over(name, config, parameters)
        elif find_spec("transformers") is not None:
            results += _transformers(name, case, parameters)
        gc.collect()
    return results


def _result(case: str, value: float, unit: str) -> dict[str, Any]:
    return {"case": case, "value": value, "unit": unit}


def _requests(config: DecoderConfig, count: int, *, context: int = CONTEXT, length: int = 96) -> list[GenerateRequest]:
    rng = np.random.default_rng(0)
    return [
        GenerateRequest(
            execution_id=f"e{number}",
            call_id=f"c{number}",
            context=rng.integers(0, config.vocab_size, context, dtype=np.int32),
            max_tokens=length,
            temperature=1.0,
            seed=number,
            stop_ids=(),
        )
        for number in range(count)
    ]


def _engine(config: DecoderConfig, parameters: Parameters, batch: int) -> TorchEngine:
    engine = TorchEngine(config, slots=2 * batch + 1, max_running=batch, kv_tokens=1 << 20)
    engine.set_version(0, parameters)
    return engine


def _decoding(name: str, case: Case, parameters: Parameters, batch: int) -> list[dict[str, Any]]:
    """Engine and bare loop in turn, median of each: what admission, noise, sampling and books cost on top."""
    ours, bare = [], []
    for _ in range(case.repeats):
        ours.append(_decode_rate(_engine(case.config, parameters, batch), case, batch))
        bare.append(_bare_loop(case, parameters, batch))
    engine_rate, bare_rate = float(np.median(ours)), float(np.median(bare))
    return [
        _result(f"{name}, decode, batch {batch}", round(engine_rate), "tokens/s"),
        _result(f"{name}, bare padded loop, batch {batch}", round(bare_rate), "tokens/s"),
        _result(f"{name}, engine / bare loop, batch {batch}", round(engine_rate / bare_rate, 3), "ratio"),
    ]


def _decode_rate(engine: CachedEngine, case: Case, batch: int) -> float:
    """Return sampled tokens a second of a batch behind its prefill."""
    for request in _requests(case.config, batch, length=case.length):
        engine.submit(request)
    engine.step()
    before, started_s = engine.counters.sampled_tokens, time.perf_counter()
    while not engine.is_idle:
        engine.step()
    return (engine.counters.sampled_tokens - before) / (time.perf_counter() - started_s)


def _transformers(name: str, case: Case, parameters: Parameters) -> list[dict[str, Any]]:
    """The same weights through transformers' own forward behind the engine."""
    built = import_module("opengyre.run.bench_transformers")
    results = []
    for batch in case.batches:
        rate = _decode_rate(built.engine_of(case.config, parameters, batch), case, batch)
        results.append(_result(f"{name}, transformers behind the engine, batch {batch}", round(rate), "tokens/s"))
    return results


@torch.no_grad()
def _bare_loop(case: Case, parameters: Parameters, batch: int) -> float:
    """Padded decoding over a gathered static cache with torch's own sampling, the loop that one writes first."""
    config = case.config
    cache = KeyValueCache(config, slots=batch + 1)
    tokens = torch.from_numpy(np.stack([item.context for item in _requests(config, batch)]).astype(np.int64))
    slots = torch.arange(batch).flip(0)
    starts = torch.zeros(batch, dtype=torch.int64)
    counts = torch.full((batch,), CONTEXT)
    logits = forward_cached(config, parameters, cache, tokens, slots, starts, counts)
    starts, counts = starts + CONTEXT, torch.ones(batch, dtype=torch.int64)
    started_s = time.perf_counter()
    for _ in range(case.length - 1):
        chosen = torch.multinomial(torch.softmax(logits, -1), 1)
        logits = forward_cached(config, parameters, cache, chosen, slots, starts, counts)
        starts = starts + 1
    return batch * (case.length - 1) / (time.perf_counter() - started_s)


def _prefill(name: str, config: DecoderConfig, parameters: Parameters) -> list[dict[str, Any]]:
    """Speed of prefill, and what a call that extends a path computes."""
    engine = _engine(config, parameters, 16)
    asked = _requests(config, 16, context=512)
    for request in asked:
        engine.submit(msgspec.structs.replace(request, max_tokens=1))
    started_s = time.perf_counter()
    while not engine.is_idle:
        engine.step()
    rate = engine.counters.prefilled_tokens / (time.perf_counter() - started_s)
    before = engine.counters.prefilled_tokens
    extended = np.concatenate((asked[0].context, np.arange(40, dtype=np.int32)))
    engine.submit(msgspec.structs.replace(asked[0], context=extended, max_tokens=1))
    engine.step()
    return [
        _result(f"{name}, prefill", round(rate), "tokens/s"),
        _result(f"{name}, 512 cached + 40 new tokens", engine.counters.prefilled_tokens - before, "tokens computed"),
    ]


def _hand_over(name: str, config: DecoderConfig, parameters: Parameters) -> list[dict[str, Any]]:
    """Sixteen live calls leave one engine and have sampled their next token on another, with and without their keys."""
    results = []
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        for kind, place in (("keys moved", Path(folder)), ("computed again", None)):
            first, second = _engine(config, parameters, 16), _engine(config, parameters, 16)
            asked = {request.call_id: request for request in _requests(config, 16, context=400)}
            for request in asked.values():
                first.submit(request)
            for _ in range(20):
                first.step()
            started_s = time.perf_counter()
            for call_id, partial in first.hand_over(place):
                _resubmit(second, asked[call_id], partial)
            second.step()
            elapsed_s = time.perf_counter() - started_s
            results.append(
                _result(f"{name}, 16 calls of 420 tokens handed over, {kind}", round(1000 * elapsed_s, 1), "ms")
            )
    return results


def _resubmit(engine: TorchEngine, request: GenerateRequest, partial: HandedOver) -> None:
    moved = take_moved(Path(partial.kv_path)) if partial.kv_path else None
    continued = msgspec.structs.replace(
        request, output=partial.output, behaviour_logprobs=partial.behaviour_logprobs, versions=partial.versions
    )
    engine.submit(continued, moved=moved)
