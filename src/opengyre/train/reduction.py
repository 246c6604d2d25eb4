"""Adding gradients in an order that neither cells nor time can change: micro-step by micro-step, by their ids."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from opengyre.core.errors import InvariantError
from opengyre.model.decoder import Parameters

Parts = dict[str, Parameters]
"""Micro-step id to its gradient."""
_MARK = "|"


def named_parts(parts: Parts) -> Parameters:
    """Return the gradients of micro-steps as one flat dict for a file.

    >>> parts = {"g0-m0": {"embed": torch.ones(2)}}
    >>> list(named_parts(parts)), parts_of(named_parts(parts)).keys() == parts.keys()
    (['g0-m0|embed'], True)
    """
    return {
        f"{micro_step_id}{_MARK}{name}": tensor
        for micro_step_id, part in parts.items()
        for name, tensor in part.items()
    }


def parts_of(tensors: Parameters) -> Parts:
    """Return what ``named_parts`` flattened."""
    parts: Parts = {}
    for key, tensor in tensors.items():
        micro_step_id, _, name = key.partition(_MARK)
        parts.setdefault(micro_step_id, {})[name] = tensor
    return parts


def joined(cells: Iterable[Parts]) -> Parts:
    """Return the parts of several cells together.

    Raises:
        InvariantError: A micro-step stands in two of them.
    """
    found: Parts = {}
    for parts in cells:
        twice = found.keys() & parts.keys()
        if twice:
            raise InvariantError(f"micro-steps {sorted(twice)} were counted by two cells")
        found |= parts
    return found


def sum_in_order(parts: Parts, like: Mapping[str, Tensor]) -> Parameters:
    """Return the sum over micro-steps in the order of their ids; zeros like ``like`` where there is none.

    Choice: kept apart and added one after the other on the core, for float addition depends on its order. It costs the
    memory of one gradient a micro-step.

    >>> parts = {"b": {"w": torch.tensor([1e8])}, "a": {"w": torch.tensor([1.0])}, "c": {"w": torch.tensor([-1e8])}}
    >>> float(sum_in_order(parts, {"w": torch.zeros(1)})["w"])
    0.0
    """
    total = {name: torch.zeros_like(tensor) for name, tensor in like.items()}
    for micro_step_id in sorted(parts):
        for name, tensor in parts[micro_step_id].items():
            total[name] += tensor
    return total
