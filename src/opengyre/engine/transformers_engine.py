"""Any causal language model that transformers loads, behind the same batching, prefix cache and hand-over.

The model's own forward computes; keys and values lie in the rows of our cache, which it sees as one of its own. Weights
of a version are a dict under the model's names, so several versions share one model.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.func import functional_call
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

from opengyre.core.errors import FileError
from opengyre.engine.batching import PREFILL_TOKENS
from opengyre.engine.torch_engine import CachedEngine
from opengyre.model.decoder import KeyValueCache, Parameters, first_of_run, rows_of


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes of a model's cache.

    Example: SmolLM2-135M is ``ModelShape(layers=30, kv_heads=3, head_size=64, context_tokens=8192)``.
    """

    layers: int
    kv_heads: int
    head_size: int
    context_tokens: int


def shape_of(model: PreTrainedModel, *, context_tokens: int) -> ModelShape:
    """Return the sizes of a model's cache.

    Args:
        model: A causal language model.
        context_tokens: Positions to serve, at most those of the model.

    Raises:
        FileError: Its layers do not all attend to everything before (sliding windows, state spaces), or its positions
            are fewer.
    """
    config = model.config.get_text_config(decoder=True)
    name = config.model_type
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    heads = getattr(config, "num_attention_heads", None)
    if kinds != {"full_attention"} or heads is None:
        raise FileError(f"{name}: layers of kind {', '.join(sorted(kinds))}: expected full attention in every layer")
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and context_tokens > positions:
        raise FileError(f"{name}: {positions} positions, expected at least {context_tokens}")
    return ModelShape(
        layers=config.num_hidden_layers,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_size=getattr(config, "head_dim", None) or config.hidden_size // heads,
        context_tokens=context_tokens,
    )


def load_model(
    folder: Path, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> PreTrainedModel:
    """Return a causal language model from a folder, ready to be sampled from.

    Raises:
        FileError: There is none, or transformers does not know it.
    """
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
    except (OSError, ValueError) as error:
        raise FileError(f"{folder}: not a causal language model: {str(error).splitlines()[0]}") from error
    loaded: PreTrainedModel = model.to(device).eval()
    return loaded


class _RowLayer(CacheLayerMixin):
    """One layer of the model's cache: rows of ours, in which new keys and values are written in place."""

    def __init__(self, keys: Tensor, values: Tensor, view: "_View") -> None:
        super().__init__()
        self._all_keys, self._all_values, self._view = keys, values, view
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing is lazy."""

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Write new keys and values [b, heads, t, d] and return all of the rows, [b, heads, top, d]."""
        view = self._view
        found = []
        for stored, new in ((self._all_keys, key_states), (self._all_values, value_states)):
            stored[view.row_index, :, view.position_index] = new.transpose(1, 2)[view.valid].to(stored.dtype)
            found.append(rows_of(stored[:, :, : view.top], view.rows, view.first).to(new.dtype))
        return found[0], found[1]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return length and offset of what ``update`` gives back."""
        return self._view.top, 0

    def get_seq_length(self) -> int:
        """Return the tokens before the new ones; positions are given to the model, so nothing depends on it."""
        return self._view.top - self._view.valid.shape[1]

    def get_max_length(self) -> int:
        """Return the room of a row."""
        return self._all_keys.shape[2]


@dataclass(frozen=True, eq=False)
class _View:
    """Which rows a pass extends, and where: new tokens are left-padded, so that each row's last one stands last."""

    rows: Tensor
    first: int | None
    positions: Tensor
    """[b, t] int64; 0 on padding."""
    valid: Tensor
    """[b, t] bool."""
    row_index: Tensor
    position_index: Tensor
    top: int


def _view_of(rows: Tensor, starts: Tensor, counts: Tensor) -> _View:
    length, device = int(counts.max()), rows.device
    offsets = torch.arange(length, device=device)[None] - (length - counts[:, None])
    valid = offsets >= 0
    positions = (starts[:, None] + offsets).clamp(min=0)
    return _View(
        rows=rows,
        first=first_of_run(rows),
        positions=positions,
        valid=valid,
        row_index=rows[:, None].expand(-1, length)[valid],
        position_index=positions[valid],
        top=int((starts + counts).max()),
    )


class TransformersEngine(CachedEngine):
    """A transformers model.

    Args:
        model: Its forward computes; its own weights serve no version until ``weights`` are set as one.
        context_tokens: Positions of a call at most.
        slots: Sequences that the cache holds, running or kept for reuse.
        max_running: Calls decoded at once.
        kv_tokens: Tokens of running calls that may be resident at once, outputs at full length included.
        prefill_tokens: Padded tokens of a prefill pass, and new tokens of one call in one step, at most.

    Raises:
        FileError: The model's layers or positions do not fit, see ``shape_of``.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        context_tokens: int,
        slots: int,
        max_running: int,
        kv_tokens: int,
        prefill_tokens: int = PREFILL_TOKENS,
    ) -> None:
        super().__init__(
            shape_of(model, context_tokens=context_tokens),
            slots=slots,
            max_running=max_running,
            kv_tokens=kv_tokens,
            dtype=model.dtype,
            device=model.device,
            prefill_tokens=prefill_tokens,
        )
        self._model = model.eval()

    @torch.no_grad()
    def _forward(self, parameters: Parameters, tokens: Tensor, rows: Tensor, starts: Tensor, counts: Tensor) -> Tensor:
        view = _view_of(rows, starts, counts)
        padded = torch.zeros_like(tokens)
        padded[view.valid] = tokens[torch.arange(tokens.shape[1], device=self.device)[None] < counts[:, None]]
        allowed = torch.arange(view.top, device=self.device)[None, None, None] <= view.positions[:, None, :, None]
        smallest = torch.finfo(self._model.dtype).min
        mask = torch.zeros(allowed.shape, dtype=self._model.dtype, device=self.device).masked_fill_(~allowed, smallest)
        asked = {
            "input_ids": padded,
            "attention_mask": mask,
            "position_ids": view.positions,
            "cache": _cache_of(self._cache, view),
            "use_cache": True,
            "logits_to_keep": 1,
        }
        logits: Tensor = functional_call(self._model, parameters, args=(), kwargs=asked).logits
        return logits[:, -1]


def _cache_of(cache: KeyValueCache, view: _View) -> Cache:
    layers = [_RowLayer(keys, values, view) for keys, values in zip(cache.keys, cache.values, strict=True)]
    return Cache(layers=layers)


def weights_of(model: PreTrainedModel) -> Parameters:
    """Return a copy of a model's weights under its own names: what serves a version."""
    return {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
