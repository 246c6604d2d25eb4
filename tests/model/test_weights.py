"""Weight files: durable, named as other tools expect, refused when they are not what they say."""

import msgspec
import pytest
import torch
from safetensors import safe_open

from opengyre.core.errors import FileError, RunError
from opengyre.model.decoder import DecoderConfig, init_parameters
from opengyre.model.weights import read_version, write_tensors, write_version

CONFIG = DecoderConfig(vocab_size=30, hidden_size=16, layers=2, heads=4, kv_heads=2, mlp_size=20)


def written(folder):
    parameters = init_parameters(CONFIG, torch.Generator().manual_seed(3))
    return parameters, write_version(folder / "v7.safetensors", CONFIG, parameters, version=7, incarnation=2)


def test_a_version_comes_back_bit_for_bit_with_its_shape(tmp_path):
    parameters, reference = written(tmp_path)
    config, read = read_version(reference)
    assert config == CONFIG
    assert (reference.version, reference.incarnation) == (7, 2)
    assert read.keys() == parameters.keys()
    assert all(torch.equal(read[name], parameters[name]) for name in read)
    assert [path.name for path in tmp_path.iterdir()] == ["v7.safetensors"]


def test_files_carry_the_names_and_shapes_of_a_llama_checkpoint(tmp_path):
    _, reference = written(tmp_path)
    with safe_open(reference.path, framework="pt") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        assert file.metadata()["version"] == "7"
    assert shapes["model.embed_tokens.weight"] == (30, 16)
    assert shapes["model.layers.1.self_attn.q_proj.weight"] == (16, 16)
    assert shapes["model.layers.1.self_attn.k_proj.weight"] == (8, 16)
    assert shapes["model.layers.0.mlp.down_proj.weight"] == (16, 20)
    assert len(shapes) == 2 + 2 * 9


def test_a_changed_byte_is_seen_by_the_checksum(tmp_path):
    _, reference = written(tmp_path)
    path = tmp_path / "v7.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(FileError, match=f"expected {reference.checksum}"):
        read_version(reference)


def test_missing_foreign_and_nonsense_files_are_refused_by_name(tmp_path):
    _, reference = written(tmp_path)
    with pytest.raises(FileError, match=r"absent\.safetensors"):
        read_version(msgspec.structs.replace(reference, path=str(tmp_path / "absent.safetensors")))
    (tmp_path / "nonsense").write_bytes(b"12345678")
    with pytest.raises(FileError, match="not a readable safetensors file"):
        read_version(msgspec.structs.replace(reference, path=str(tmp_path / "nonsense"), checksum=""))
    write_tensors(tmp_path / "foreign", {"a": torch.zeros(2)}, {})
    with pytest.raises(FileError, match="not a weight file of this decoder"):
        read_version(msgspec.structs.replace(reference, path=str(tmp_path / "foreign"), checksum=""))


def test_a_folder_that_cannot_be_written_ends_the_run_in_one_line(tmp_path):
    with pytest.raises(RunError, match="bytes cannot be written"):
        write_tensors(tmp_path / "no" / "such" / "file", {"a": torch.zeros(2)}, {})
