"""The reference engine: continuous batching on one torch thread, token in, token out.

``step`` admits queued calls, computes their new context tokens, and decodes one token for every running call. Several
versions of the weights can be resident: pinned calls keep theirs, all others follow the current one.

Running calls lie in the first rows of the cache, in order, so that decoding reads keys and values without copying them;
a row changes places when a call comes or ends, not with every token.
"""

from abc import abstractmethod
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from opengyre.engine.batching import PREFILL_TOKENS, BatchingEngine
from opengyre.engine.live import LiveCall
from opengyre.engine.moved import MovedCache, write_moved
from opengyre.engine.sampling import sample, uniform_draws
from opengyre.engine.slots import Placement
from opengyre.model.decoder import CacheShape, DecoderConfig, KeyValueCache, Parameters, forward_cached


class CachedEngine(BatchingEngine[Parameters, MovedCache]):
    """Continuous batching over one cache of keys and values; a subclass has the forward.

    Args:
        shape: Sizes of the cache.
        slots: Sequences that the cache holds, running or kept for reuse.
        max_running: Calls decoded at once.
        kv_tokens: Tokens of running calls that may be resident at once, outputs at full length included.
        dtype: Number format of the cache; the weights bring their own.
        device: Where cache and weights lie.
        prefill_tokens: Padded tokens of a prefill pass, and new tokens of one call in one step, at most.
    """

    def __init__(
        self,
        shape: CacheShape,
        *,
        slots: int,
        max_running: int,
        kv_tokens: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        prefill_tokens: int = PREFILL_TOKENS,
    ) -> None:
        super().__init__(
            context_tokens=shape.context_tokens,
            slots=slots,
            max_running=max_running,
            kv_tokens=kv_tokens,
            prefill_tokens=prefill_tokens,
        )
        self.device = torch.device(device)
        self._cache = KeyValueCache(shape, slots=slots, dtype=dtype, device=self.device)
        self._row_of = list(range(slots))
        self._slot_in = list(range(slots))

    @abstractmethod
    def _forward(self, parameters: Parameters, tokens: Tensor, rows: Tensor, starts: Tensor, counts: Tensor) -> Tensor:
        """Extend cached sequences and return the logits behind their last new token, [b, vocab].

        Args:
            parameters: Weights of the version.
            tokens: [b, t] int64, right-padded new tokens.
            rows: [b] int64, rows of the cache.
            starts: [b] int64, tokens already cached.
            counts: [b] int64, new tokens, at least 1.
        """

    def _compute(
        self, group: list[LiveCall[MovedCache]], counts: list[int], version: int, ready: list[int]
    ) -> list[tuple[int, float]]:
        tokens = np.zeros((len(group), max(counts)), np.int64)
        for row, live in enumerate(group):
            tokens[row, : counts[row]] = live.tokens[live.computed : live.computed + counts[row]]
        logits = self._forward(
            self.parameters(version),
            torch.from_numpy(tokens).to(self.device),
            torch.tensor([self._row_of[live.slot] for live in group], device=self.device),
            torch.tensor([live.computed for live in group], device=self.device),
            torch.tensor(counts, device=self.device),
        )
        if not ready:
            return []
        if len(ready) < len(group):
            group, logits = [group[row] for row in ready], logits[ready]
        return sample_calls(group, logits)

    def _move_keys(self, slot: int, row: int) -> None:
        """Bring a slot's tokens into a row; what lay there takes the row that becomes free."""
        old, other = self._row_of[slot], self._slot_in[row]
        if old == row:
            return
        lengths = self._book.slot(slot).length, self._book.slot(other).length
        self._cache.swap(old, row, one_length=lengths[0], other_length=lengths[1])
        self._row_of[slot], self._row_of[other] = row, old
        self._slot_in[row], self._slot_in[old] = slot, other

    def _place_keys(self, placement: Placement, *, row: int) -> None:
        source, slot = placement.copy_from, placement.slot
        if source is not None and source != slot:
            self._cache.copy(self._row_of[source], self._row_of[slot], placement.cached)
        self._move_keys(slot, row)

    def _load_keys(self, slot: int, moved: MovedCache) -> None:
        self._cache.load(self._row_of[slot], moved.block)

    def _write_keys(self, live: LiveCall[MovedCache], path: Path) -> bool:
        block = self._cache.export(self._row_of[live.slot], live.computed)
        return write_moved(path, MovedCache(live.version, block))


class TorchEngine(CachedEngine):
    """The embedded policy.

    Args:
        config: Shape of the decoder.
        slots: Sequences that the cache holds, running or kept for reuse.
        max_running: Calls decoded at once.
        kv_tokens: Tokens of running calls that may be resident at once, outputs at full length included.
        dtype: Number format of the cache; the weights bring their own.
        device: Where cache and weights lie.
        prefill_tokens: Padded tokens of a prefill pass, and new tokens of one call in one step, at most.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        slots: int,
        max_running: int,
        kv_tokens: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        prefill_tokens: int = PREFILL_TOKENS,
    ) -> None:
        super().__init__(
            config,
            slots=slots,
            max_running=max_running,
            kv_tokens=kv_tokens,
            dtype=dtype,
            device=device,
            prefill_tokens=prefill_tokens,
        )
        self.config = config

    def _forward(self, parameters: Parameters, tokens: Tensor, rows: Tensor, starts: Tensor, counts: Tensor) -> Tensor:
        return forward_cached(self.config, parameters, self._cache, tokens, rows, starts, counts)


def sample_calls(group: list[LiveCall[MovedCache]], logits: torch.Tensor) -> list[tuple[int, float]]:
    """Return the next token and its logprob of each call under its own settings.

    Args:
        group: b calls.
        logits: [b, v]; half precision is sampled from, and measured, as fp32.
    """
    requests = [live.request for live in group]
    seeds = np.array([request.seed for request in requests], np.uint64)
    positions = np.array([live.sampled for live in group], np.uint64)
    device = logits.device
    if logits.dtype in (torch.bfloat16, torch.float16):
        logits = logits.float()
    restricted = any(request.top_p < 1 or request.top_k for request in requests)
    ids, logprobs = sample(
        logits,
        temperatures=torch.tensor([request.temperature for request in requests], device=device),
        draws=uniform_draws(seeds, positions),
        top_p=torch.tensor([request.top_p for request in requests], device=device) if restricted else None,
        top_k=torch.tensor([request.top_k for request in requests], device=device) if restricted else None,
    )
    return list(zip(ids.tolist(), logprobs.tolist(), strict=True))
