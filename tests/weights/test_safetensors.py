"""The safetensors reader against the format's library, and against files that are damaged or hostile."""

from __future__ import annotations

import json
import os
import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from octavo.errors import ModelError
from octavo.weights.checkpoint import PLAIN_DTYPES, to_float32
from octavo.weights.safetensors import SafetensorsCheckpoint
from tests.weights.files import safetensors_header, write_safetensors


def refused(path: Path, raw: bytes) -> str:
    path.write_bytes(raw)
    with pytest.raises(ModelError) as caught:
        SafetensorsCheckpoint([path])
    assert path.name in str(caught.value)
    return str(caught.value)


def entry(dtype: str, shape: list[Any], start: int, stop: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


def test_equals_the_library(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    tensors = {
        "a": rng.normal(size=(3, 5)).astype(np.float32),
        "b": rng.normal(size=(7,)).astype(np.float16),
        "scalar": np.array(3, dtype=np.int64),
        "empty": np.zeros((0, 4), dtype=np.float32),
        "flags": np.array([True, False]),
    }
    path = tmp_path / "model.safetensors"
    safetensors.numpy.save_file(tensors, path, metadata={"format": "pt"})
    checkpoint = SafetensorsCheckpoint([path])
    assert sorted(checkpoint.names()) == sorted(tensors)
    for name, array in tensors.items():
        found = checkpoint.read(name)
        assert found.dtype == array.dtype and np.array_equal(found, array)
        assert not found.flags.writeable


def test_bfloat16_and_float8_values(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    codes = np.arange(256, dtype=np.uint8)
    raw = np.arange(0, 65536, 7, dtype=np.uint16)
    header = {
        "e4": entry("F8_E4M3", [256], 0, 256),
        "e5": entry("F8_E5M2", [256], 256, 512),
        "bf": entry("BF16", [len(raw)], 512, 512 + 2 * len(raw)),
    }
    path = tmp_path / "model.safetensors"
    path.write_bytes(safetensors_header(header, codes.tobytes() * 2 + raw.tobytes()))
    checkpoint = SafetensorsCheckpoint([path])
    kinds = {"e4": torch.float8_e4m3fn, "e5": torch.float8_e5m2, "bf": torch.bfloat16}
    for name, kind in kinds.items():
        bits = checkpoint.read(name)
        mine = to_float32(bits, checkpoint.info(name).dtype)
        theirs = torch.from_numpy(bits.copy()).view(kind).float().numpy()
        assert np.array_equal(mine, theirs, equal_nan=True)


def test_unaligned_data_reads_right(tmp_path: Path) -> None:
    header = json.dumps({"a": entry("F32", [2], 0, 8)})
    header += " " * ((1 - len(header)) % 8)  # the data begins one byte after a multiple of eight
    path = tmp_path / "model.safetensors"
    path.write_bytes(safetensors_header(header, np.array([1.5, -2], "<f4").tobytes()))
    assert SafetensorsCheckpoint([path]).read("a").tolist() == [1.5, -2]


def shards(folder: Path) -> dict[str, str]:
    """Three shards with an index."""
    names = {f"t{i}": f"model-0000{i + 1}-of-00003.safetensors" for i in range(3)}
    for name, file in names.items():
        write_safetensors(folder / file, {name: np.full((2, 2), float(name[1]), np.float32)})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    return names


def test_sharded(tmp_path: Path) -> None:
    names = shards(tmp_path)
    checkpoint = SafetensorsCheckpoint.from_folder(tmp_path)
    assert sorted(checkpoint.names()) == sorted(names)
    assert checkpoint.read("t2").tolist() == [[2, 2], [2, 2]]
    assert checkpoint.info("t1").file.endswith(names["t1"])


def test_missing_shard_is_named(tmp_path: Path) -> None:
    """Case B-61."""
    names = shards(tmp_path)
    (tmp_path / names["t1"]).unlink()
    with pytest.raises(ModelError, match=names["t1"]):
        SafetensorsCheckpoint.from_folder(tmp_path)


def test_truncated_shard_is_named(tmp_path: Path) -> None:
    """Case B-61."""
    path = tmp_path / shards(tmp_path)["t2"]
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(ModelError, match=path.name):
        SafetensorsCheckpoint.from_folder(tmp_path)


def test_index_with_a_tensor_that_its_shard_lacks(tmp_path: Path) -> None:
    """Case B-61."""
    names = shards(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": names | {"ghost": names["t0"]}}))
    with pytest.raises(ModelError, match="ghost"):
        SafetensorsCheckpoint.from_folder(tmp_path)
    index.write_text(json.dumps({"weight_map": names | {"t0": names["t1"]}}))
    with pytest.raises(ModelError, match="t0"):
        SafetensorsCheckpoint.from_folder(tmp_path)


@pytest.mark.parametrize("name", ["../evil.safetensors", "/etc/x.safetensors", "a/b.safetensors", "model.bin", ""])
def test_index_may_not_leave_its_folder(tmp_path: Path, name: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(ModelError, match="not a safetensors file"):
        SafetensorsCheckpoint.from_folder(tmp_path)


@pytest.mark.parametrize("text", ["[]", "{", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}', "[" * 100000])
def test_broken_index(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ModelError, match="index.json"):
        SafetensorsCheckpoint.from_folder(tmp_path)


def test_folder_without_index(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no safetensors file"):
        SafetensorsCheckpoint.from_folder(tmp_path)
    write_safetensors(tmp_path / "a.safetensors", {"a": np.zeros(1, np.float32)})
    assert SafetensorsCheckpoint.from_folder(tmp_path).names() == ["a"]
    write_safetensors(tmp_path / "b.safetensors", {"b": np.zeros(1, np.float32)})
    with pytest.raises(ModelError, match="2 safetensors files"):
        SafetensorsCheckpoint.from_folder(tmp_path)


def test_damaged_headers_are_refused_with_a_reason(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    data = bytes(16)
    good = entry("F32", [4], 0, 16)

    def header(value: Any) -> str:
        return refused(path, safetensors_header(value, data))

    assert "cut off" in refused(path, struct.pack("<Q", 1 << 63) + b"{}")
    assert "cut off" in refused(path, struct.pack("<Q", 100) + b"{}")
    assert "cut off" in refused(path, b"\x02\x00")
    refused(path, struct.pack("<Q", 0))
    assert "overlap" in header({"a": entry("F32", [3], 0, 12), "b": entry("F32", [2], 8, 16)})
    assert "hole" in header({"a": entry("F32", [1], 0, 4), "b": entry("F32", [2], 8, 16)})
    assert "hole" in header({"a": entry("F32", [2], 8, 16)})
    assert "16 bytes" not in header({"a": entry("F32", [2], 0, 8)})  # data left over
    assert "shape needs" in header({"a": entry("F32", [5], 0, 16)})
    assert "shape needs" in header({"a": entry("F16", [4], 0, 16)})
    assert "shape needs" in header({"a": entry("F32", [4], 16, 0)})
    assert "shape needs" in header({"a": entry("F32", [2**62, 2**62], 0, 16)})
    assert "'Q3'" in header({"a": entry("Q3", [4], 0, 16)})
    assert "'a'" in header({"a": entry("F32", [-4], 0, 16)})
    assert "'a'" in header({"a": entry("F32", ["4"], 0, 16)})
    assert "'a'" in header({"a": entry("F32", [1] * 100, 0, 16)})
    assert "'a'" in header({"a": {"dtype": "F32", "shape": [4]}})
    assert "'a'" in header({"a": 1})
    assert "damaged header" in header("[]")
    assert "damaged header" in header("{" * 100_000)
    assert "damaged header" in header(b"\xff\xfe")
    one = json.dumps(good)
    assert "twice" in header(f'{{"a": {one}, "a": {one}}}')
    assert "damaged" in header(f'{{"a": {one}}} garbage')


def test_truncated_and_mutated_files_never_crash(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write_safetensors(path, {"a": np.zeros((2, 3), np.float32), "b": np.ones(4, np.float16)})
    raw = path.read_bytes()
    for length in range(len(raw)):
        if length:
            refused(path, raw[:length])
    rng = random.Random(5)
    for _ in range(600):
        broken = bytearray(raw)
        for _ in range(rng.choice((1, 2, 5))):
            broken[rng.randrange(len(broken))] = rng.randrange(256)
        path.write_bytes(broken)
        try:
            checkpoint = SafetensorsCheckpoint([path])
        except ModelError:
            continue
        for name in checkpoint.names():
            checkpoint.read(name).tobytes()


def test_fifo_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match="regular"):
        SafetensorsCheckpoint.from_folder(tmp_path)


def test_tensor_in_two_files(tmp_path: Path) -> None:
    files = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    for file in files:
        write_safetensors(file, {"same": np.zeros(1, np.float32)})
    with pytest.raises(ModelError, match="repeats"):
        SafetensorsCheckpoint(files)


def test_every_plain_type_has_a_size() -> None:
    assert all(dtype.itemsize in (1, 2, 4, 8) for dtype in PLAIN_DTYPES.values())
