"""Split GGUF files: read as one, from the name of any part; incomplete or renamed parts are refused."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from octavo.errors import ModelError
from octavo.weights.fetch import resolve_model
from octavo.weights.gguf import GgufCheckpoint

TENSORS = {f"t{i}": np.full((2, 32), i, np.float32) for i in range(7)}


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    """Seven tensors in three parts, as the `gguf` package splits them."""
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama", split_max_tensors=3)
    writer.add_uint32("llama.block_count", 5)
    for name, array in TENSORS.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(tmp_path.glob("m-*.gguf"))


def test_any_part_opens_all(parts: list[Path]) -> None:
    assert len(parts) == 3
    for path in parts:
        checkpoint = GgufCheckpoint(path)
        assert sorted(checkpoint.names()) == sorted(TENSORS)
        assert checkpoint.metadata["llama.block_count"] == 5
        for name, array in TENSORS.items():
            assert np.array_equal(checkpoint.read(name), array)


def test_a_folder_of_parts_is_one_model(parts: list[Path]) -> None:
    assert resolve_model(parts[0].parent).path == parts[0]
    (parts[0].parent / "other.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError, match="4 .gguf files"):
        resolve_model(parts[0].parent)


def test_missing_part(parts: list[Path]) -> None:
    parts[1].unlink()
    for path in (parts[0], parts[0].parent):
        with pytest.raises(ModelError, match="m-00002-of-00003.gguf"):
            GgufCheckpoint(resolve_model(path).path)


def test_swapped_parts(parts: list[Path]) -> None:
    first, second = parts[0].read_bytes(), parts[1].read_bytes()
    parts[0].write_bytes(second)
    parts[1].write_bytes(first)
    with pytest.raises(ModelError, match=r"part 1 \(from 0\) of 3"):
        GgufCheckpoint(parts[0])


def test_renamed_part_and_whole_file_with_the_name_of_a_part(parts: list[Path]) -> None:
    lone = parts[0].rename(parts[0].with_name("whole.gguf"))
    with pytest.raises(ModelError, match="Keep the names"):
        GgufCheckpoint(lone)


@pytest.mark.parametrize("name", ["m-00004-of-00003.gguf", "m-00000-of-00003.gguf", "m-00001-of-99999.gguf"])
def test_impossible_names(parts: list[Path], name: str) -> None:
    path = parts[0].rename(parts[0].with_name(name))
    with pytest.raises(ModelError, match="part"):
        GgufCheckpoint(path)


def test_tensor_in_two_parts(parts: list[Path]) -> None:
    data = parts[1].read_bytes()
    assert data.count(b"t3") == 1
    parts[1].write_bytes(data.replace(b"t3", b"t0"))
    with pytest.raises(ModelError, match="repeats the tensor 't0'"):
        GgufCheckpoint(parts[0])
