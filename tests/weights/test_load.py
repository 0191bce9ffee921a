"""The load plan: what is refused before reading, and what the tensors look like that come out."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest

from octavo.errors import ModelError
from octavo.model.spec import LayerSpec, ModelSpec, RopeSpec, weight_needs
from octavo.quantization import ggml
from octavo.weights.checkpoint import Array, Checkpoint, TensorInfo, to_float32
from octavo.weights.gguf import GgufCheckpoint
from octavo.weights.load import DummyCheckpoint, check, delivered_dtype, load
from octavo.weights.needs import Source, TensorNeed
from octavo.weights.safetensors import SafetensorsCheckpoint
from tests.weights.files import write_safetensors

SMOLLM2_LAYERS = tuple(LayerSpec(1536) for _ in range(30))
SMOLLM2 = ModelSpec(
    "llama", 49152, 576, 9, 3, 64, SMOLLM2_LAYERS, 8192, 1e-5, RopeSpec(1e5), True, "bfloat16"
)
TINY = ModelSpec(
    "llama", 50, 16, 4, 2, 4, (LayerSpec(24, qkv_bias=True), LayerSpec(24)), 64, 1e-5, RopeSpec(), False, "float32"
)


class Memory:
    """A checkpoint of arrays. Block types are uint8 arrays listed with their type."""

    def __init__(self, arrays: dict[str, Array], types: dict[str, str] | None = None) -> None:
        self.arrays, self.types, self.reads = arrays, types or {}, list[str]()

    def names(self) -> list[str]:
        return list(self.arrays)

    def info(self, name: str) -> TensorInfo:
        array, kind = self.arrays[name], self.types.get(name, "F32")
        shape = array.shape
        if kind in ggml.BY_NAME and ggml.BY_NAME[kind].block > 1:
            block = ggml.BY_NAME[kind]
            shape = (*shape[:-1], shape[-1] // block.nbytes * block.block)
        return TensorInfo(name, kind, shape, array.nbytes, "memory")

    def read(self, name: str) -> Array:
        self.reads.append(name)
        return self.arrays[name]


def need(name: str, *sources: Source) -> TensorNeed:
    rows = sum(source.shape[0] for source in sources)
    return TensorNeed(name, (rows, *sources[0].shape[1:]), sources)


def tiny_folder(folder: Path, spec: ModelSpec = TINY) -> dict[str, Array]:
    """The tensors of a tiny model, in the folder's model.safetensors."""
    dummy = DummyCheckpoint(weight_needs(spec, "hf"), "F32")
    tensors = {name: dummy.read(name) for name in dummy.names()}
    write_safetensors(folder / "model.safetensors", tensors)
    return tensors


def check_folder(folder: Path, spec: ModelSpec = TINY) -> None:
    check(weight_needs(spec, "hf"), SafetensorsCheckpoint.from_folder(folder))


def test_joined_in_order(tmp_path: Path) -> None:
    tensors = tiny_folder(tmp_path)
    loaded = {item.name: item for item in load(weight_needs(TINY, "hf"), SafetensorsCheckpoint.from_folder(tmp_path))}
    parts = [tensors[f"model.layers.0.self_attn.{key}_proj.weight"] for key in "qkv"]
    assert np.array_equal(loaded["layers.0.qkv"].array, np.concatenate(parts))
    assert loaded["layers.0.qkv_bias"].array.shape == (32,)
    assert loaded["layers.1.gate_up"].array.shape == (48, 16)
    assert {item.dtype for item in loaded.values()} == {"F32"}
    assert list(loaded) == [item.name for item in weight_needs(TINY, "hf")]


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.1.mlp.up_proj.weight",
        "model.layers.0.self_attn.q_proj.bias",
        "model.norm.weight",
        "lm_head.weight",
    ],
)
def test_missing_tensor_is_named(tmp_path: Path, name: str) -> None:
    """Case B-62."""
    tensors = tiny_folder(tmp_path)
    del tensors[name]
    write_safetensors(tmp_path / "model.safetensors", tensors)
    with pytest.raises(ModelError, match=name):
        check_folder(tmp_path)


def test_misshapen_and_missing_are_reported_together(tmp_path: Path) -> None:
    """Case B-62."""
    tensors = tiny_folder(tmp_path)
    name = "model.layers.0.mlp.down_proj.weight"
    tensors[name] = np.ascontiguousarray(tensors[name].T)
    del tensors["model.norm.weight"]
    write_safetensors(tmp_path / "model.safetensors", tensors)
    with pytest.raises(ModelError) as caught:
        check_folder(tmp_path)
    assert "1 tensors are missing: model.norm.weight" in str(caught.value)
    assert f"{name} is [24, 16] instead of [16, 24]" in str(caught.value)


def test_long_lists_end_in_a_count() -> None:
    sources = [Source(f"t{i}", (1,)) for i in range(300)]
    with pytest.raises(ModelError) as caught:
        check([need("all", *sources)], Memory({}))
    assert "300 tensors are missing" in str(caught.value) and "and 290 more" in str(caught.value)
    assert len(str(caught.value)) < 500


def test_integers_are_no_weights() -> None:
    memory = Memory({"a": np.zeros((2, 2), np.int32)}, {"a": "I32"})
    with pytest.raises(ModelError, match="I32"):
        check([need("a", Source("a", (2, 2)))], memory)


def test_extra_tensors_warn_once_and_known_ones_not_at_all(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Case B-62."""
    tied = replace(TINY, tied_head=True)
    tensors = tiny_folder(tmp_path)  # untied: its head is redundant for the tied model
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(2, np.float32)
    write_safetensors(tmp_path / "model.safetensors", tensors)
    with caplog.at_level(logging.WARNING):
        check_folder(tmp_path, tied)
    assert not caplog.records
    tensors |= {f"surprise.{i}": np.zeros(1, np.float32) for i in range(40)}
    write_safetensors(tmp_path / "model.safetensors", tensors)
    with caplog.at_level(logging.WARNING):
        check_folder(tmp_path, tied)
    assert len(caplog.records) == 1
    assert "40 tensors" in caplog.text and "surprise.0" in caplog.text


def test_nothing_is_read_before_the_check_is_over() -> None:
    memory = Memory({"a": np.zeros((2, 2), np.float32)})
    with pytest.raises(ModelError):
        list(load([need("a", Source("a", (2, 2))), need("b", Source("b", (2, 2)))], memory))
    assert memory.reads == []


def test_smollm2_loads_with_half_split_heads(smollm2_gguf: Path, oracle: gguf.GGUFReader) -> None:
    checkpoint = GgufCheckpoint(smollm2_gguf)
    needs = [item for item in weight_needs(SMOLLM2, "gguf") if item.name in ("layers.3.qkv", "layers.3.down", "norm")]
    check(weight_needs(SMOLLM2, "gguf"), checkpoint)
    loaded = {item.name: item for item in load(needs, checkpoint)}
    tensors = {tensor.name: tensor for tensor in oracle.tensors}

    def plain(name: str) -> Array:
        tensor = tensors[f"blk.3.attn_{name}.weight"]
        return gguf.dequantize(tensor.data, tensor.tensor_type)

    def half_split(matrix: Array, heads: int) -> Array:
        return matrix.reshape(heads, len(matrix) // heads // 2, 2, -1).swapaxes(1, 2).reshape(matrix.shape)

    expected = np.concatenate([half_split(plain("q"), 9), half_split(plain("k"), 3), plain("v")])
    assert np.array_equal(loaded["layers.3.qkv"].array, expected)
    assert loaded["layers.3.down"].array.shape == (576, 1536)
    assert {item.dtype for item in loaded.values()} == {"F32"}


def test_packed_blocks_are_delivered_as_stored(smollm2_gguf: Path) -> None:
    checkpoint = GgufCheckpoint(smollm2_gguf)
    needs = [item for item in weight_needs(SMOLLM2, "gguf") if item.name == "layers.0.qkv"]
    plain = next(load(needs, checkpoint))
    packed = next(load(needs, checkpoint, packed={"layers.0.qkv"}))
    assert packed.dtype == delivered_dtype(needs[0], checkpoint, {"layers.0.qkv"}) == "Q4_1"
    assert packed.array.shape == (960, 576 // 32 * 20) and packed.array.dtype == np.uint8
    assert np.array_equal(to_float32(packed.array, "Q4_1"), plain.array)


def test_mixed_types_are_widened() -> None:
    rng = np.random.default_rng(0)
    halves = rng.normal(size=(2, 32)).astype(np.float16)
    blocks = rng.integers(0, 60, (3, 34), dtype=np.uint8)
    memory = Memory({"a": halves, "b": blocks}, {"a": "F16", "b": "Q8_0"})
    wanted = need("ab", Source("a", (2, 32)), Source("b", (3, 32)))
    item = next(load([wanted], memory, packed={"ab"}))
    assert item.dtype == "F32"
    assert np.array_equal(item.array, np.concatenate([halves.astype(np.float32), ggml.dequantize(blocks, "Q8_0")]))


def sliced(source: Source, rows: tuple[int, int] | None, columns: tuple[int, int] | None) -> Source:
    return replace(source, rows=rows, columns=columns)


def test_slices_for_tensor_parallel() -> None:
    rng = np.random.default_rng(0)
    q, k = rng.normal(size=(8, 6)).astype(np.float32), rng.normal(size=(4, 6)).astype(np.float32)
    memory: Checkpoint = Memory({"q": q, "k": k})
    # Two ranks, each with half of the heads (4 and 2 heads of 2 rows), rotary order restored within each head.
    whole = next(load([need("qk", Source("q", (8, 6), 2), Source("k", (4, 6), 1))], memory)).array
    first = TensorNeed("q", (4, 6), (sliced(Source("q", (8, 6), 2), (0, 4), None),))
    second = TensorNeed("q", (4, 6), (sliced(Source("q", (8, 6), 2), (4, 8), None),))
    parts = [next(load([wanted], memory)).array for wanted in (first, second)]
    assert np.array_equal(np.concatenate(parts), whole[:8])
    columns = TensorNeed("q", (8, 2), (sliced(Source("q", (8, 6)), None, (2, 4)),))
    assert np.array_equal(next(load([columns], memory)).array, q[:, 2:4])


def test_column_slices_of_blocks() -> None:
    blocks = np.random.default_rng(0).integers(0, 60, (3, 4 * 34), dtype=np.uint8)
    memory = Memory({"a": blocks}, {"a": "Q8_0"})
    half = TensorNeed("a", (3, 64), (Source("a", (3, 128), columns=(64, 128)),))
    assert np.array_equal(next(load([half], memory)).array, ggml.dequantize(blocks, "Q8_0")[:, 64:])
    torn = TensorNeed("a", (3, 48), (Source("a", (3, 128), columns=(16, 64)),))
    with pytest.raises(ModelError, match="blocks of 32"):
        check([torn], memory)


def test_single_plain_source_is_not_copied(tmp_path: Path) -> None:
    tiny_folder(tmp_path)
    checkpoint = SafetensorsCheckpoint.from_folder(tmp_path)
    item = next(load([need("norm", Source("model.norm.weight", (16,)))], checkpoint))
    assert item.array.base is not None and not item.array.flags.writeable


def test_dummy_weights_are_repeatable_and_sane() -> None:
    needs = weight_needs(TINY, "hf")
    first, again = DummyCheckpoint(needs, "F32"), DummyCheckpoint(needs, "F32")
    other = DummyCheckpoint(needs, "F32", seed=1)
    name = "model.layers.0.mlp.up_proj.weight"
    assert np.array_equal(first.read(name), again.read(name))
    assert not np.array_equal(first.read(name), other.read(name))
    assert not np.array_equal(first.read(name), first.read(name.replace("up", "gate")))
    assert np.array_equal(first.read("model.norm.weight"), np.ones(16))
    matrix = DummyCheckpoint([need("m", Source("m", (500, 4096)))], "F32").read("m")
    assert abs(matrix.std() * 64 - 1) < 0.01 and abs(matrix.mean()) < 1e-4
    assert len(np.unique(matrix, axis=0)) == 500
    check(needs, first)


@pytest.mark.parametrize("dtype", ["F64", "F32", "F16", "BF16"])
def test_dummy_types(dtype: str) -> None:
    needs = weight_needs(TINY, "hf")
    for item in load(needs, DummyCheckpoint(needs, dtype)):
        assert item.dtype == dtype
        values = item.array if dtype == "F64" else to_float32(item.array, dtype)
        assert np.isfinite(values).all() and np.abs(values).max() <= 1
