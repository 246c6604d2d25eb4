"""Measure the reference engine: decoding against a bare padded loop, prefix cache, hand-over; two model sizes."""

import gc
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from opengyre.core.cells import HandedOver
from opengyre.core.protocols import GenerateRequest
from opengyre.engine.moved import take_moved
from opengyre.engine.torch_engine import TorchEngine
from opengyre.model.decoder import DecoderConfig, KeyValueCache, Parameters, forward_cached, init_parameters

SHAPES = {
    "0.7M": DecoderConfig(vocab_size=676, hidden_size=128, layers=4, heads=4, kv_heads=2, mlp_size=256),
    "3M": DecoderConfig(vocab_size=2048, hidden_size=192, layers=6, heads=6, kv_heads=2, mlp_size=512),
}
CONTEXT, LENGTH = 64, 96
REPEATS = 3


def run() -> list[dict[str, Any]]:
    """Return one result for each case: case, value, unit."""
    torch.set_num_threads(1)
    results: list[dict[str, Any]] = []
    for name, config in SHAPES.items():
        parameters = init_parameters(config, torch.Generator().manual_seed(0))
        for batch in (1, 8, 16, 32):
            results += _decoding(name, config, parameters, batch)
        results += _prefill(name, config, parameters)
        results += _hand_over(name, config, parameters)
        gc.collect()
    return results


def _result(case: str, value: float, unit: str) -> dict[str, Any]:
    return {"case": case, "value": value, "unit": unit}


def _requests(config: DecoderConfig, count: int, *, context: int = CONTEXT) -> list[GenerateRequest]:
    rng = np.random.default_rng(0)
    return [
        GenerateRequest(
            execution_id=f"e{number}",
            call_id=f"c{number}",
            context=rng.integers(0, config.vocab_size, context, dtype=np.int32),
            max_tokens=LENGTH,
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


def _decoding(name: str, config: DecoderConfig, parameters: Parameters, batch: int) -> list[dict[str, Any]]:
    """Engine and bare loop in turn, median of each: what admission, noise, sampling and books cost on top."""
    ours, bare = [], []
    for _ in range(REPEATS):
        engine = _engine(config, parameters, batch)
        for request in _requests(config, batch):
            engine.submit(request)
        engine.step()
        before, started_s = engine.counters.sampled_tokens, time.perf_counter()
        while not engine.is_idle:
            engine.step()
        ours.append((engine.counters.sampled_tokens - before) / (time.perf_counter() - started_s))
        bare.append(_bare_loop(config, parameters, batch))
    engine_rate, bare_rate = float(np.median(ours)), float(np.median(bare))
    return [
        _result(f"{name}, decode, batch {batch}", round(engine_rate), "tokens/s"),
        _result(f"{name}, bare padded loop, batch {batch}", round(bare_rate), "tokens/s"),
        _result(f"{name}, engine / bare loop, batch {batch}", round(engine_rate / bare_rate, 3), "ratio"),
    ]


@torch.no_grad()
def _bare_loop(config: DecoderConfig, parameters: Parameters, batch: int) -> float:
    """Padded decoding over a gathered static cache with torch's own sampling, the loop that one writes first."""
    cache = KeyValueCache(config, slots=batch + 1)
    tokens = torch.from_numpy(np.stack([item.context for item in _requests(config, batch)]).astype(np.int64))
    slots = torch.arange(batch).flip(0)
    starts = torch.zeros(batch, dtype=torch.int64)
    counts = torch.full((batch,), CONTEXT)
    logits = forward_cached(config, parameters, cache, tokens, slots, starts, counts)
    starts, counts = starts + CONTEXT, torch.ones(batch, dtype=torch.int64)
    started_s = time.perf_counter()
    for _ in range(LENGTH - 1):
        chosen = torch.multinomial(torch.softmax(logits, -1), 1)
        logits = forward_cached(config, parameters, cache, chosen, slots, starts, counts)
        starts = starts + 1
    return batch * (LENGTH - 1) / (time.perf_counter() - started_s)


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
