"""The GGUF reader against the `gguf` package, and against files that are damaged or hostile."""

from __future__ import annotations

import os
import random
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from octavo.errors import ModelError
from octavo.quantization import ggml
from octavo.weights.checkpoint import to_float32
from octavo.weights.gguf import GgufCheckpoint
from tests.weights.files import gguf_bytes, gguf_string, gguf_tensor, gguf_value

F32, Q4_1, Q8_0 = 0, 3, 8


@pytest.fixture(scope="module")
def checkpoint(smollm2_gguf: Path) -> GgufCheckpoint:
    return GgufCheckpoint(smollm2_gguf)


def small_file(path: Path, version: int = 3) -> bytes:
    """A valid file with every kind of value and three tensors; also written to `path`."""
    metadata = {
        "general.architecture": "llama",
        "flag": True,
        "number": 7,
        "half": 0.5,
        "names": ["a", "", "ü"],
        "numbers": [1, 2, 3],
        "nested": [[1, 2], [3]],
        "flags": [True, False],
    }
    tensors = [
        gguf_tensor("a", (4, 2), F32, 0),
        gguf_tensor("b", (32, 2), Q4_1, 32),
        gguf_tensor("c", (3,), F32, 96),
    ]
    data = np.arange(8, dtype="<f4").tobytes() + bytes(range(40)) + bytes(24) + np.ones(3, "<f4").tobytes()
    raw = gguf_bytes(metadata, tensors, data, version)
    path.write_bytes(raw)
    return raw


def refused(path: Path, raw: bytes) -> str:
    path.write_bytes(raw)
    with pytest.raises(ModelError) as caught:
        GgufCheckpoint(path)
    assert path.name in str(caught.value)
    return str(caught.value)


def test_metadata_equals_oracle(checkpoint: GgufCheckpoint, oracle: gguf.GGUFReader) -> None:
    keys = [key for key in oracle.fields if not key.startswith("GGUF.")]
    assert list(checkpoint.metadata) == keys
    for key in keys:
        value = checkpoint.metadata[key]
        assert (value.tolist() if isinstance(value, np.ndarray) else value) == oracle.fields[key].contents()


def test_tensors_equal_oracle_bit_for_bit(checkpoint: GgufCheckpoint, oracle: gguf.GGUFReader) -> None:
    assert checkpoint.names() == [tensor.name for tensor in oracle.tensors]
    kinds = set()
    for tensor in oracle.tensors[:25] + oracle.tensors[-3:]:
        info = checkpoint.info(tensor.name)
        assert info.shape == tuple(int(size) for size in tensor.shape[::-1])
        assert (info.dtype, info.nbytes) == (tensor.tensor_type.name, tensor.n_bytes)
        mine = to_float32(checkpoint.read(tensor.name), info.dtype)
        theirs = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        assert np.array_equal(mine.view(np.uint32), theirs.reshape(mine.shape).view(np.uint32))
        kinds.add(info.dtype)
    assert kinds == {"Q8_0", "Q4_1", "F32"}


@pytest.mark.parametrize("name", [kind.name for kind in ggml.BY_NAME.values() if kind.dequantize])
def test_dequantize_equals_oracle_on_random_blocks(name: str) -> None:
    kind = ggml.BY_NAME[name]
    rng = np.random.default_rng(1)
    packed = rng.integers(0, 256, (3, 40, 5 * kind.nbytes), dtype=np.uint8)
    # Scales are halves: random bits are often inf or nan, which the oracle also has, but never compare equal.
    with np.errstate(invalid="ignore"):
        mine = ggml.dequantize(packed, name)
        theirs = gguf.dequantize(packed, gguf.GGMLQuantizationType[name]).astype(np.float32)
    assert mine.shape == (3, 40, 5 * kind.block)
    assert np.array_equal(mine, theirs, equal_nan=True)


def test_block_sizes_equal_oracle() -> None:
    for kind, (block, nbytes) in gguf.GGML_QUANT_SIZES.items():
        if kind.name != "Q8_1":  # the package counts an older layout
            assert (ggml.BY_CODE[kind.value].block, ggml.BY_CODE[kind.value].nbytes) == (block, nbytes)
            assert ggml.BY_CODE[kind.value].name == kind.name


@pytest.mark.parametrize("version", [2, 3])
def test_every_kind_of_value_and_plain_types(tmp_path: Path, version: int) -> None:
    path = tmp_path / "small.gguf"
    small_file(path, version)
    checkpoint = GgufCheckpoint(path)
    numbers = checkpoint.metadata.pop("numbers")
    assert numbers.tolist() == [1, 2, 3]
    nested = checkpoint.metadata.pop("nested")
    assert [part.tolist() for part in nested] == [[1, 2], [3]]
    assert checkpoint.metadata == {
        "general.architecture": "llama",
        "flag": True,
        "number": 7,
        "half": 0.5,
        "names": ["a", "", "ü"],
        "flags": [True, False],
    }
    assert checkpoint.read("a").tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert checkpoint.read("b").shape == (2, 20) and checkpoint.read("b")[1].tolist() == list(range(20, 40))
    assert not checkpoint.read("a").flags.writeable


def test_half_types(tmp_path: Path) -> None:
    values = np.array([[1.5, -2.0], [0.0, 65504.0]], dtype="<f2")
    brain = (np.array([[1.5, -2.0]], dtype="<f4").view("<u4") >> 16).astype("<u2")
    tensors = [gguf_tensor("h", (2, 2), 1, 0), gguf_tensor("b", (2, 1), 30, 32)]
    path = tmp_path / "half.gguf"
    path.write_bytes(gguf_bytes({}, tensors, values.tobytes() + bytes(24) + brain.tobytes()))
    checkpoint = GgufCheckpoint(path)
    assert to_float32(checkpoint.read("h"), checkpoint.info("h").dtype).tolist() == values.tolist()
    assert checkpoint.read("b").dtype == np.uint16
    assert to_float32(checkpoint.read("b"), checkpoint.info("b").dtype).tolist() == [[1.5, -2.0]]


def test_truncated_anywhere_is_refused(tmp_path: Path) -> None:
    raw = small_file(tmp_path / "small.gguf")
    for length in [0, *range(1, len(raw), 3), len(raw) - 1]:
        refused(tmp_path / "cut.gguf", raw[:length])


def test_mutated_headers_never_crash(tmp_path: Path) -> None:
    raw = bytearray(small_file(tmp_path / "small.gguf"))
    rng = random.Random(3)
    refusals = 0
    for _ in range(600):
        broken = bytearray(raw)
        for _ in range(rng.choice((1, 1, 2, 8))):
            place = rng.randrange(len(broken))
            broken[place] = rng.choice((0, 1, 255, rng.randrange(256)))
        path = tmp_path / "mutated.gguf"
        path.write_bytes(broken)
        try:
            checkpoint = GgufCheckpoint(path)
        except ModelError:
            refusals += 1
            continue
        for name in checkpoint.names():
            checkpoint.read(name).tobytes()
    assert refusals > 120


def test_hostile_lengths_cost_nothing(tmp_path: Path) -> None:
    head = b"GGUF" + struct.pack("<I", 3)
    huge = struct.pack("<Q", 1 << 62)
    assert "tensors" in refused(tmp_path / "a.gguf", head + huge + struct.pack("<Q", 0))
    assert "metadata" in refused(tmp_path / "b.gguf", head + struct.pack("<Q", 0) + huge)
    one = head + struct.pack("<QQ", 0, 1)
    refused(tmp_path / "c.gguf", one + huge)
    refused(tmp_path / "d.gguf", one + gguf_string("k") + struct.pack("<I", 8) + huge)
    for kind in (0, 7, 8, 9, 12):
        array = struct.pack("<II", 9, kind) + huge
        assert "values" in refused(tmp_path / "e.gguf", one + gguf_string("k") + array)
    deep = struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 100_000
    assert "nested" in refused(tmp_path / "f.gguf", one + gguf_string("k") + deep)


def test_damaged_structure_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    data = bytes(256)

    def table(*tensors: bytes, **metadata: object) -> str:
        return refused(path, gguf_bytes(metadata, list(tensors), data))

    assert "big endian" in refused(path, b"GGUF" + struct.pack(">I", 3))
    assert "version 1" in refused(path, b"GGUF" + struct.pack("<I", 1))
    assert "not a GGUF file" in refused(path, b"PK\x03\x04" + bytes(100))
    twice = gguf_tensor("a", (4,), F32, 0)
    assert "'a' twice" in table(twice, twice)
    assert "same place" in table(gguf_tensor("a", (16,), F32, 0), gguf_tensor("b", (4,), F32, 32))
    assert "cut off" in table(gguf_tensor("a", (65,), F32, 0))
    assert "cut off" in table(gguf_tensor("a", (1 << 40, 1 << 40, 1 << 40, 1 << 40), F32, 0))
    assert "not a multiple" in table(gguf_tensor("a", (4,), F32, 4))
    assert "shape" in table(gguf_tensor("a", (33,), Q4_1, 0))
    assert "shape" in table(gguf_tensor("a", (0,), F32, 0))
    assert "dimensions" in table(gguf_tensor("a", (1,) * 5, F32, 0))
    assert "unknown type 99" in table(gguf_tensor("a", (32,), 99, 0))
    assert "alignment" in table(gguf_tensor("a", (4,), F32, 0), **{"general.alignment": 24})
    assert "parts" in table(**{"split.count": 3})
    key = gguf_string("k") + gguf_value(1)
    assert "'k' twice" in refused(path, b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + key * 2)
    boolean = gguf_string("k") + struct.pack("<IB", 7, 2)
    assert "boolean" in refused(path, b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + boolean)
    latin = gguf_string("k") + struct.pack("<I", 8) + gguf_string(b"\xff\xfe")
    assert "UTF-8" in refused(path, b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + latin)


def test_unsupported_type_is_named_with_its_count(tmp_path: Path) -> None:
    tensors = [gguf_tensor("a", (256,), 23, 0), gguf_tensor("b", (256,), 23, 160)]
    message = refused(tmp_path / "x.gguf", gguf_bytes({}, tensors, bytes(512)))
    assert "IQ4_XS (2 tensors)" in message and "Q8_0" in message


def test_only_regular_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.gguf")
    (tmp_path / "folder.gguf").mkdir()
    (tmp_path / "empty.gguf").touch()
    for name, reason in {"fifo": "regular", "folder": "regular", "empty": "empty", "none": "not exist"}.items():
        with pytest.raises(ModelError, match=reason):
            GgufCheckpoint(tmp_path / f"{name}.gguf")
    small_file(tmp_path / "real.bin")
    (tmp_path / "link.gguf").symlink_to(tmp_path / "real.bin")
    assert GgufCheckpoint(tmp_path / "link.gguf").names() == ["a", "b", "c"]
