"""From a checkpoint to a model's tensors: check everything first, then read one tensor after the other.

`check` compares what the model needs with what the checkpoint has and reports all differences at once, before
any weight is read. `load` then yields the tensors in the order of the needs; about one of them is in memory at
a time, besides what the consumer keeps. `DummyCheckpoint` stands in for files with seeded filler.
"""

from __future__ import annotations

import hashlib
import logging
import math
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from octavo.errors import ModelError, invariant
from octavo.quantization import ggml
from octavo.quantization.packed import Packed, join
from octavo.weights.checkpoint import (
    PLAIN_DTYPES,
    QUANTISED,
    Array,
    Checkpoint,
    TensorInfo,
    is_block_type,
    to_float32,
)
from octavo.weights.needs import Source, TensorNeed
from octavo.weights.quantized import packed_tensor

_log = logging.getLogger(__name__)

_SHOWN = 10
_NOTHING = np.empty(0, np.float32)
_FLOATS = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")

# Tensors that files carry although the model computes them: rotary frequencies, masks, a tied head.
_HARMLESS = re.compile(
    r"rotary_emb\.inv_freq$|\.attn\.(masked_)?bias$|^lm_head\.weight$|^output\.weight$|\.[kv](_proj\.[kv])?_scale$"
)


class Loaded(NamedTuple):
    """One tensor of the model. `array` may be a read-only view of a file: copy it to keep it.

    `dtype` is a tag of `weights.checkpoint`: "BF16" comes as uint16, block types as bytes. "QUANTISED" comes as
    `parts`, whose rows come one after the other: one matrix where they could be joined; plain ones with their tag.
    """

    name: str
    array: Array
    dtype: str
    parts: tuple[Packed | tuple[Array, str], ...] = ()


def check(needs: Sequence[TensorNeed], checkpoint: Checkpoint) -> None:
    """ModelError that lists what is missing or misshapen; one warning for tensors that nobody needs."""
    present = set(checkpoint.names())
    missing, unfit = [], []
    wanted: set[str] = set()
    for need in needs:
        rows = sum(_taken_shape(source)[0] for source in need.sources)
        invariant(all((rows, *_taken_shape(s)[1:]) == need.shape for s in need.sources), f"need {need}")
        for source in need.sources:
            wanted.add(source.name)
            if source.name not in present:
                missing.append(source.name)
            elif reason := _unfit(source, checkpoint.info(source.name)):
                unfit.append(f"{source.name} {reason}")
    problems = []
    if missing:
        problems.append(f"{len(missing)} tensors are missing: {_some(missing)}")
    if unfit:
        problems.append(f"{len(unfit)} tensors do not fit: {_some(unfit)}")
    if problems:
        raise ModelError(
            f"The weights do not match the model's configuration. {'. '.join(problems)}.",
            "Check that the download is complete and that weights and configuration belong together.",
        )
    extra = [name for name in checkpoint.names() if name not in wanted and not _HARMLESS.search(name)]
    if extra:
        _log.warning("%d tensors of the checkpoint are not used: %s", len(extra), _some(extra))


def delivered_dtype(
    need: TensorNeed, checkpoint: Checkpoint, packed: Collection[str] = (), quantised: Collection[str] = ()
) -> str:
    """The dtype tag that `load` will deliver for `need`.

    "QUANTISED" where a source is, and the need is named in `quantised`; else it is widened to "F32".
    Plain types stay as stored. Block types are widened to "F32", except for needs named in `packed`. Sources
    of different types are always widened to "F32", since they could not be joined otherwise, and so is what gets
    an offset.
    """
    kinds = {checkpoint.info(source.name).dtype for source in need.sources}
    if not kinds.isdisjoint(QUANTISED):
        return "QUANTISED" if need.name in quantised else "F32"
    kind = kinds.pop()
    widen = kinds or need.offset or (is_block_type(kind) and need.name not in packed)
    return "F32" if widen else kind


def load(
    needs: Sequence[TensorNeed],
    checkpoint: Checkpoint,
    packed: Collection[str] = (),
    quantised: Collection[str] = (),
) -> Iterator[Loaded]:
    """Yield every need as one array, after `check`.

    `packed` holds the internal names of tensors wanted as packed blocks, `quantised` of those that may come as
    `Loaded.parts`; `delivered_dtype` tells what comes.
    A progress bar counts bytes when standard error is a terminal.
    """
    check(needs, checkpoint)
    sizes = [sum(checkpoint.info(source.name).nbytes for source in need.sources) for need in needs]
    # disable=None: tqdm shows nothing when the output is no terminal.
    with tqdm(total=sum(sizes), unit="B", unit_scale=True, desc="Loading weights", disable=None) as bar:
        for need, size in zip(needs, sizes, strict=True):
            dtype = delivered_dtype(need, checkpoint, packed, quantised)
            if dtype == "QUANTISED":
                yield Loaded(need.name, _NOTHING, dtype, _parts(need, checkpoint))
            else:
                yield Loaded(need.name, _assemble(need, checkpoint, dtype), dtype)
            bar.update(size)


def _parts(need: TensorNeed, checkpoint: Checkpoint) -> tuple[Packed | tuple[Array, str], ...]:
    """The sources of a need of which some are quantised, as one matrix if they can be stored in one."""
    parts: list[Packed | tuple[Array, str]] = []
    for source in need.sources:
        dtype = checkpoint.info(source.name).dtype
        if dtype not in QUANTISED:
            widen = "F32" if is_block_type(dtype) else dtype
            parts.append((_as(_take(source, checkpoint), dtype, widen), widen))
            continue
        matrix = packed_tensor(checkpoint, source.name)
        if source.rows:
            matrix = matrix.take_rows(*source.rows)
        if source.columns:
            matrix = matrix.take_columns(*source.columns)
        parts.append(matrix)
    matrices = [part for part in parts if isinstance(part, Packed)]
    joined = join(matrices) if len(matrices) == len(parts) > 1 else None
    return tuple(parts) if joined is None else (joined,)


def _assemble(need: TensorNeed, checkpoint: Checkpoint, dtype: str) -> Array:
    """Slices, reorders, widens and joins the sources of one need."""
    if len(need.sources) == 1:
        part = _take(need.sources[0], checkpoint)
        part = _as(part, checkpoint.info(need.sources[0].name).dtype, dtype)
        return part + np.float32(need.offset) if need.offset else part
    result = np.empty((0,))
    row = 0
    for source in need.sources:
        part = _as(_take(source, checkpoint), checkpoint.info(source.name).dtype, dtype)
        if row == 0:
            result = np.empty((need.shape[0], *part.shape[1:]), dtype=part.dtype)
        result[row : row + len(part)] = part
        row += len(part)
    return result


def _take(source: Source, checkpoint: Checkpoint) -> Array:
    """The wanted rows and columns of a source, as stored, heads in half-split order."""
    info = checkpoint.info(source.name)
    stored = checkpoint.read(source.name)
    if source.rows:
        stored = stored[slice(*source.rows)]
    if source.columns:
        start, stop = source.columns
        if is_block_type(info.dtype):
            kind = ggml.BY_NAME[info.dtype]
            start, stop = start // kind.block * kind.nbytes, stop // kind.block * kind.nbytes
        stored = stored[..., start:stop]
    if source.rope_heads:
        half = source.shape[0] // source.rope_heads // 2
        heads = stored.reshape(len(stored) // (2 * half), half, 2, *stored.shape[1:])
        stored = heads.swapaxes(1, 2).reshape(stored.shape)
    return stored.reshape(-1, stored.shape[-1]) if stored.ndim > 2 else stored


def _as(stored: Array, dtype: str, wanted: str) -> Array:
    """`stored` widened if `wanted` says so; aligned and contiguous in any case, a view where it can be."""
    if dtype != wanted:
        return to_float32(stored, dtype)
    return np.require(stored, requirements=["C", "A"])


def _taken_shape(source: Source) -> tuple[int, ...]:
    shape = list(source.shape)
    if source.columns:
        shape[-1] = source.columns[1] - source.columns[0]
    if source.rows:
        shape[0] = source.rows[1] - source.rows[0]
    return (math.prod(shape[:-1]), shape[-1]) if len(shape) > 2 else tuple(shape)


def _unfit(source: Source, info: TensorInfo) -> str:
    """Why a present tensor cannot serve as `source`; empty when it can."""
    if info.shape != source.shape:
        return f"is {list(info.shape)} instead of {list(source.shape)}"
    if is_block_type(info.dtype):
        block = ggml.BY_NAME[info.dtype].block
        if source.columns and (source.columns[0] % block or source.columns[1] % block):
            return f"cannot be split at columns {source.columns}: {info.dtype} has blocks of {block}"
    elif info.dtype not in _FLOATS + QUANTISED:
        return f"has the type {info.dtype}, which is not a weight that Octavo reads"
    return ""


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


class DummyCheckpoint:
    """Seeded filler for a model without files: the same plan, the same values for the same name and seed.

    Norms and rotary factors are 1; all else is uniform with standard deviation 1/sqrt(row length), which keeps
    activations and logits at the scale of a real model. `dtype` is "F64", "F32", "F16" or "BF16".
    """

    _POOL = 1_000_003  # a prime: no row length divides it, so rows differ

    def __init__(self, needs: Iterable[TensorNeed], dtype: str = "BF16", seed: int = 0) -> None:
        self._infos: dict[str, TensorInfo] = {}
        self._seed = seed
        for source in (source for need in needs for source in need.sources):
            nbytes = math.prod(source.shape) * PLAIN_DTYPES[dtype].itemsize
            self._infos[source.name] = TensorInfo(source.name, dtype, source.shape, nbytes, "(dummy weights)")
        bound = math.sqrt(3.0)
        self._pool = np.random.default_rng(seed).uniform(-bound, bound, self._POOL).astype(np.float32)

    def names(self) -> list[str]:
        """All tensor names."""
        return list(self._infos)

    def info(self, name: str) -> TensorInfo:
        """Facts about one tensor."""
        return self._infos[name]

    def read(self, name: str) -> Array:
        """The filler of one tensor, made anew at each call."""
        info = self._infos[name]
        if len(info.shape) == 1 and ("norm" in name or "rope" in name):
            return np.broadcast_to(_narrow(np.ones(1, np.float32), info.dtype), info.shape)
        digest = hashlib.sha256(f"{self._seed}:{name}".encode()).digest()
        values = np.roll(self._pool, int.from_bytes(digest[:4], "little")) / np.float32(math.sqrt(info.shape[-1]))
        return np.resize(_narrow(values, info.dtype), info.shape)


def _narrow(values: Array, dtype: str) -> Array:
    """float32 values in the stored form of `dtype`; bfloat16 by rounding half up."""
    if dtype == "BF16":
        return ((values.view(np.uint32) + 0x8000) >> 16).astype(np.uint16)
    return values.astype(PLAIN_DTYPES[dtype])
