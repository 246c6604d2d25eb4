"""Weight files: one safetensors file a version, written under a temporary name, synced, then renamed.

Files carry Hugging Face Llama names, so that any tool reads them; the shape of the decoder stands in the metadata.
"""

from dataclasses import asdict
from pathlib import Path

import msgspec
import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from opengyre.core.cells import WeightsRef
from opengyre.core.durable import write_durably
from opengyre.core.errors import FileError
from opengyre.model.decoder import DecoderConfig, Parameters

_PLAIN = {
    "attention_norm": "input_layernorm",
    "output": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "down": "mlp.down_proj",
}


def to_file_names(config: DecoderConfig, parameters: Parameters) -> Parameters:
    """Return the parameters under Hugging Face names, fused projections split."""
    named: Parameters = {"model.embed_tokens.weight": parameters["embed"], "model.norm.weight": parameters["norm"]}
    query, kv = config.heads * config.head_size, config.kv_heads * config.head_size
    for layer in range(config.layers):
        ours, theirs = f"layers.{layer}.", f"model.layers.{layer}."
        for name, file_name in _PLAIN.items():
            named[f"{theirs}{file_name}.weight"] = parameters[ours + name]
        for name, part in zip("qkv", torch.split(parameters[ours + "qkv"], [query, kv, kv]), strict=True):
            named[f"{theirs}self_attn.{name}_proj.weight"] = part
        gate, up = torch.split(parameters[ours + "gate_up"], config.mlp_size)
        named[f"{theirs}mlp.gate_proj.weight"], named[f"{theirs}mlp.up_proj.weight"] = gate, up
    return named


def from_file_names(config: DecoderConfig, named: Parameters) -> Parameters:
    """Return fused parameters of tensors under Hugging Face names.

    Raises:
        KeyError: A tensor is missing.
    """
    parameters: Parameters = {"embed": named["model.embed_tokens.weight"], "norm": named["model.norm.weight"]}
    for layer in range(config.layers):
        ours, theirs = f"layers.{layer}.", f"model.layers.{layer}."
        for name, file_name in _PLAIN.items():
            parameters[ours + name] = named[f"{theirs}{file_name}.weight"]
        parameters[ours + "qkv"] = torch.cat([named[f"{theirs}self_attn.{name}_proj.weight"] for name in "qkv"])
        parameters[ours + "gate_up"] = torch.cat([named[f"{theirs}mlp.{name}_proj.weight"] for name in ("gate", "up")])
    return parameters


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> str:
    """Write a safetensors file durably and return the xxh3-128 of its bytes, hexadecimal.

    Raises:
        RunError: The disk is full or not writable.
    """
    return write_durably(path, save({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, metadata))


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return tensors and metadata of a safetensors file.

    Raises:
        FileError: The file is missing or not a safetensors file.
    """
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise FileError(f"{path}: not a readable safetensors file: {error}") from error


def write_version(
    path: Path, config: DecoderConfig, parameters: Parameters, *, version: int, incarnation: int
) -> WeightsRef:
    """Write one version of the weights and return the reference to it.

    Raises:
        RunError: The disk is full or not writable.
    """
    metadata = {
        "decoder": msgspec.json.encode(asdict(config)).decode(),
        "version": str(version),
        "incarnation": str(incarnation),
    }
    checksum = write_tensors(path, to_file_names(config, parameters), metadata)
    return WeightsRef(version=version, incarnation=incarnation, path=str(path), checksum=checksum)


def read_version(reference: WeightsRef, *, dtype: torch.dtype = torch.float32) -> tuple[DecoderConfig, Parameters]:
    """Return shape and parameters of a version; checks the checksum unless it is empty.

    Raises:
        FileError: The file is missing, is not a weight file, or its checksum differs.
    """
    path = Path(reference.path)
    if reference.checksum:
        try:
            seen = xxhash.xxh3_128_hexdigest(path.read_bytes())
        except OSError as error:
            raise FileError(f"{path}: cannot be read: {error.strerror}") from error
        if seen != reference.checksum:
            raise FileError(f"{path}: checksum {seen}, expected {reference.checksum}")
    tensors, metadata = read_tensors(path)
    try:
        config = DecoderConfig(**msgspec.json.decode(metadata["decoder"]))
        return config, from_file_names(config, {name: tensor.to(dtype) for name, tensor in tensors.items()})
    except (KeyError, TypeError) as error:
        raise FileError(f"{path}: not a weight file of this decoder: {error} is missing") from error
