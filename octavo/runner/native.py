"""NativeRunner: plans executed by the C++ engine on the processor, without torch.

`build_native` reads a model's weights into the engine's own packed layout, one tensor at a time; `NativeRunner` then
turns each plan into one native call (two or more for a step with rare rows). Device rows are numpy arrays: last
token, block table, parameter words. A launch computes at once and the ticket is the result.

Shape letters: S device rows (row 0 is padding), M table columns, R rows of a step, T its tokens, N rows that sample,
P parameter words, V padded vocabulary.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from octavo.errors import ConfigError
from octavo.kernels.native import missing
from octavo.machine import usable_cores
from octavo.model.rotary import inverse_frequencies
from octavo.model.spec import ModelSpec, RopeSpec
from octavo.quantization import ggml
from octavo.quantization.packed import Packed, zeros_of
from octavo.runner.base import StepResult, TokenLogprobs
from octavo.runner.edits import Edits, PromptChunk, note_edits, prompt_chunks
from octavo.scheduler.plan import P_LOGPROBS, P_ROW, PARAM_WORDS, RARE, SAMPLE, PlanView
from octavo.weights.checkpoint import QUANTISED, Array, Checkpoint, is_block_type, to_float32
from octavo.weights.load import Loaded, load
from octavo.weights.needs import Source, TensorNeed
from octavo.weights.quantized import stored_arrays

if TYPE_CHECKING:
    from octavo.kernels.native import _native

KV_TYPES = ("bfloat16", "float32", "int8")

# Block types that the engine keeps as they are; others are widened to bfloat16.
PACKED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
# Wishes for plain weights -> the engine's format.
FORMATS = {"bfloat16": "bf16", "float16": "bf16", "float32": "f32", "int8": "g8", "int4": "q4m"}

_HEAD_ROWS = 16  # rows of logits that are looked at together in a step with rare rows
# Bits of a weight in the engine with its scales; of g8 without them, which are for 128, 64 or 32 columns.
_BITS = {"Q4_0": 4.5, "Q4_1": 5, "Q5_0": 5.5, "Q5_1": 6, "Q8_0": 8.5, "Q4_K": 5, "Q5_K": 6, "Q6_K": 7}
_BITS |= {"q4m": 5, "g8": 8, "bf16": 16, "f32": 32}
_FINE = "FINE"  # tag of numbers that are to become 8 bits
_NO_BYTES, _NO_ORDER = np.empty(0, np.uint8), np.empty(0, np.int32)
_BLOCK = 32  # columns; groups that share a scale are whole blocks
_PAIRED = ("gate_up", "experts_gate_up")  # gate and up come one after the other


class Place(NamedTuple):
    """Where a tensor goes in the engine: layer (-1: none), name, part (q, k, v; number of an expert)."""

    layer: int
    name: str
    part: int


def refusal(spec: ModelSpec) -> str:
    """Why the native engine cannot run a model here; "" when it can."""
    if reason := missing():
        return reason
    if spec.head_dim % 16 or spec.head_dim > 256:
        return f"head_dim is {spec.head_dim}, not a multiple of 16 up to 256"
    if spec.heads // spec.kv_heads > 48:
        return f"{spec.heads // spec.kv_heads} query heads share one KV head, more than 48"
    return ""


class NativeRunner:
    """Runs a loaded engine; see `build_native`. `rows`: sequences at a time, `max_len`: tokens of the longest.

    Device and host are one here, so the `swap_blocks` blocks that plans swap to lie behind the `blocks` of the pool.
    """

    def __init__(
        self, engine: _native.Engine, *, blocks: int, block_size: int, rows: int, max_len: int, swap_blocks: int = 0
    ) -> None:
        self.engine = engine
        self.blocks, self.swap_blocks = blocks, swap_blocks
        self.tables_SM = np.zeros((rows + 1, -(-max_len // block_size)), np.int32)
        self.params_SP = np.zeros((rows + 1, PARAM_WORDS), np.int32)
        self.last_token_S = np.zeros(rows + 1, np.int32)
        self.edits: dict[int, Edits] = {}  # row -> changes to its logits

    def launch(self, words: NDArray[np.int32]) -> StepResult:
        """Run one plan; see `octavo.runner.base.Runner`."""
        view = PlanView(words)
        for pairs, offsets in ((view.swap_out, (0, self.blocks)), (view.copies, 0), (view.swap_in, (self.blocks, 0))):
            if len(pairs):
                self.engine.copy_blocks(np.ascontiguousarray(pairs + np.array(offsets, np.int32)))
        self._apply(view)
        picked_N = np.flatnonzero(view.flags & SAMPLE).astype(np.int32)
        tokens_N = np.empty(len(picked_N), np.int32)
        bad_N = np.zeros(len(picked_N), np.uint8)
        result = StepResult(tokens_N)
        if view.rows:
            own_R = view.device_rows[: view.decode_rows]
            ids_T = np.concatenate((self.last_token_S[own_R], view.tokens)) if len(own_R) else view.tokens
            step = (ids_T, view.device_rows, view.start, view.length, picked_N, self.tables_SM)
            chunks = prompt_chunks(view) if len(view.extras) else []
            if chunks:
                self._with_prompts(view, ids_T, picked_N, chunks, result, bad_N)
            elif (view.flags[picked_N] & RARE).any():
                self.engine.forward(*step)
                self._sample_rare(view, picked_N, np.arange(len(picked_N)), result, bad_N)
            else:
                self.engine.step(*step, self.params_SP, tokens_N, bad_N)
            self.last_token_S[view.device_rows[picked_N]] = tokens_N
        if bad_N.any():
            result.bad = bad_N.astype(np.bool_)
        return result

    def collect(self, ticket: StepResult) -> StepResult:
        """The result of a launched step; see `octavo.runner.base.Runner`."""
        return ticket

    def close(self) -> None:
        """Free weights and KV pool."""
        del self.engine

    def _apply(self, view: PlanView) -> None:
        if len(view.params):
            rows = view.params[:, P_ROW]
            self.params_SP[rows] = view.params
            note_edits(self.edits, view)
        if len(view.table):
            self.tables_SM[view.table[:, 0], view.table[:, 1]] = view.table[:, 2]

    def _with_prompts(
        self,
        view: PlanView,
        ids_T: Array,
        picked_N: NDArray[np.int32],
        chunks: list[PromptChunk],
        result: StepResult,
        bad_N: NDArray[np.uint8],
    ) -> None:
        """A step that reports on prompt tokens: their chunks go in as rows of one token, each with its own logits."""
        split = np.zeros(view.rows, np.bool_)
        split[[chunk.row for chunk in chunks]] = True
        pieces = np.where(split, view.length, 1)
        first_R = (np.cumsum(pieces) - pieces).astype(np.int32)
        within = np.arange(int(pieces.sum()), dtype=np.int32) - np.repeat(first_R, pieces)
        start = np.repeat(view.start, pieces) + within
        length = np.repeat(np.where(split, 1, view.length), pieces).astype(np.int32)
        last_N = (first_R + pieces - 1)[picked_N].astype(np.int32)
        told = [np.arange(len(chunk.targets), dtype=np.int32) + first_R[chunk.row] for chunk in chunks]
        kept = np.sort(np.concatenate([last_N, *told]))
        self.engine.forward(ids_T, np.repeat(view.device_rows, pieces), start, length, kept, self.tables_SM)
        result.prompts = {}
        for chunk, rows in zip(chunks, told, strict=True):
            entries: list[TokenLogprobs] = []
            for at in range(0, len(rows), _HEAD_ROWS):
                logits_NV, _ = self._logits(np.searchsorted(kept, rows[at : at + _HEAD_ROWS]))
                for logits_V, token in zip(logits_NV, chunk.targets[at : at + _HEAD_ROWS].tolist(), strict=True):
                    entries.append(self._token_logprobs(logits_V, token, chunk.best))
            result.prompts[chunk.row] = chunk.first, entries
        self._sample_rare(view, picked_N, np.searchsorted(kept, last_N), result, bad_N)

    def _logits(self, places_N: NDArray[np.int64]) -> tuple[NDArray[np.float32], NDArray[np.uint8]]:
        """Logits of some of the rows that the forward pass kept, and which are not finite."""
        logits_NV = np.empty((len(places_N), self.engine.padded_vocab), np.float32)
        bad_N = np.zeros(len(places_N), np.uint8)
        for run in np.split(np.arange(len(places_N)), np.flatnonzero(np.diff(places_N) != 1) + 1):
            part = slice(int(run[0]), int(run[-1]) + 1)
            self.engine.head(int(places_N[part.start]), logits_NV[part], bad_N[part])
        return logits_NV, bad_N

    def _sample_rare(
        self,
        view: PlanView,
        picked_N: NDArray[np.int32],
        places_N: NDArray[np.int64],
        result: StepResult,
        bad_N: NDArray[np.uint8],
    ) -> None:
        """Sample with some rows that need more than their parameter words: a few rows of logits at a time.

        `places_N`: where each sample is among the rows that the forward pass kept.
        """
        rows_N = view.device_rows[picked_N]
        position_N = view.start[picked_N] + view.length[picked_N]
        result.logprobs = {}
        for at in range(0, len(picked_N), _HEAD_ROWS):
            part = slice(at, min(at + _HEAD_ROWS, len(picked_N)))
            logits_NV, bad_N[part] = self._logits(places_N[part])
            rare = [i for i in range(at, part.stop) if view.flags[picked_N[i]] & RARE]
            raw_V = {i: self._edit(logits_NV[i - at], int(rows_N[i]), int(position_N[i])) for i in rare}
            params_NP = self.params_SP[rows_N[part]]
            self.engine.sample(logits_NV, params_NP, position_N[part], result.tokens[part])
            for i in rare:
                if edits := self.edits.get(int(rows_N[i])):
                    edits.took(int(result.tokens[i]))
                count = int(self.params_SP[rows_N[i], P_LOGPROBS])
                if count >= 0:
                    result.logprobs[i] = self._token_logprobs(raw_V[i], int(result.tokens[i]), count)

    def _edit(self, logits_V: NDArray[np.float32], row: int, position: int) -> NDArray[np.float32]:
        """Change a row's logits as its request wants; returns them as they were."""
        edits = self.edits.get(row)
        if edits is None:
            return logits_V
        raw_V = logits_V.copy()
        edits.apply(logits_V, position, lambda array: array)
        return raw_V

    def _token_logprobs(self, logits_V: NDArray[np.float32], token: int, count: int) -> TokenLogprobs:
        """Log-probabilities of the unmodified logits: the chosen token, its rank, and the best `count`."""
        total = self.engine.log_sum_exp(logits_V)
        ids = np.argpartition(logits_V, -count)[-count:] if count else np.empty(0, np.int64)
        ids = ids[np.lexsort((ids, -logits_V[ids]))]
        rank = self.engine.count_greater(logits_V, float(logits_V[token])) + 1
        values = (logits_V[ids] - total).astype(np.float32)
        return TokenLogprobs(float(logits_V[token] - total), rank, ids.astype(np.int32), values)


def build_native(
    spec: ModelSpec,
    needs: Sequence[TensorNeed],
    checkpoint: Checkpoint,
    *,
    blocks: int,
    block_size: int,
    rows: int,
    max_len: int,
    swap_blocks: int = 0,
    dtype: str = "bfloat16",
    as_stored: bool = True,
    kv: str = "",
    threads: int = 0,
    isa: str = "",
) -> NativeRunner:
    """Load a model into a native engine with `blocks` KV blocks (the padding block included).

    swap_blocks: blocks that plans may swap to.

    dtype: one of FORMATS; "float32" is exact. as_stored: block types stay packed as they lie in the file, whatever
    `dtype` (not for float32). kv: one of KV_TYPES, "" = float32 for float32, else bfloat16. threads: 0 = the cores
    this process may use. isa: one of `kernel_sets()`, "" = the best. Raises ConfigError, ModelError.
    """
    if reason := refusal(spec):
        raise ConfigError(f"The native engine cannot run this model: {reason}.", "Use the torch back end.")
    kv = kv or ("float32" if dtype == "float32" else "bfloat16")
    if dtype not in FORMATS or kv not in KV_TYPES:
        known = f"{', '.join(FORMATS)}; KV: {', '.join(KV_TYPES)}"
        raise ConfigError(f"The native engine does not know the types {dtype!r} and {kv!r}.", f"Known: {known}.")
    from octavo.kernels.native import _native

    sizes = [spec.vocab_size, spec.hidden_size, spec.heads, spec.kv_heads, spec.head_dim, block_size]
    sizes.append(blocks + swap_blocks)
    factors = [spec.norm_eps, spec.softmax_scale, spec.embed_scale, spec.residual_scale, spec.logit_scale]
    factors += [spec.attention_softcap, spec.logit_softcap]
    layers = [
        [layer.mlp_size, layer.window, layer.experts, layer.experts_per_token, int(layer.norm_expert_weights)]
        for layer in spec.layers
    ]
    rope = _frequencies(spec, spec.rope, needs, checkpoint), spec.rope.magnitude
    other = spec.window_rope or spec.rope
    window_rope = _frequencies(spec, other, needs, checkpoint), other.magnitude
    gelu, post_norms = spec.activation == "gelu_tanh", spec.post_norms
    try:
        engine = _native.Engine(
            sizes, factors, gelu, post_norms, layers, *rope, *window_rope, kv, threads or usable_cores(), isa
        )
        _load_weights(engine, spec, needs, checkpoint, dtype, as_stored)
        engine.ready()
    except ValueError as error:
        raise ConfigError(f"The native engine cannot run this model: {error}.", "Use the torch back end.") from None
    return NativeRunner(
        engine, blocks=blocks, block_size=block_size, rows=rows, max_len=max_len, swap_blocks=swap_blocks
    )


def _frequencies(spec: ModelSpec, rope: RopeSpec, needs: Sequence[TensorNeed], checkpoint: Checkpoint) -> list[float]:
    factors_F = None
    for need in needs:
        if need.name == "rope_factors":
            name = need.sources[0].name
            factors_F = to_float32(checkpoint.read(name), checkpoint.info(name).dtype)
    frequencies: list[float] = inverse_frequencies(rope, spec.head_dim, factors_F).tolist()
    return frequencies


def _load_weights(
    engine: _native.Engine,
    spec: ModelSpec,
    needs: Sequence[TensorNeed],
    checkpoint: Checkpoint,
    dtype: str,
    as_stored: bool,
) -> None:
    """Hand every tensor to the engine. What was read of a mapped file is let go at once."""
    places, parts = _split(spec, needs)
    names = [] if dtype == "float32" else [need.name for need in parts]
    gate: Loaded | None = None
    read: list[Source] = []
    loaded = load(parts, checkpoint, names if as_stored else (), quantised=names)
    for place, part, item in zip(places, parts, loaded, strict=True):
        if place.name == "rope_factors":
            continue
        read += part.sources
        if item.array.ndim == 1 and not item.parts:
            vector = np.ascontiguousarray(to_float32(item.array, item.dtype))
            engine.add_vector(place.layer, place.name, place.part, vector)
        elif place.name not in _PAIRED:
            _add(engine, place, item, None, dtype)
        elif gate is None:
            gate = item
            continue  # both halves are packed into the same panels
        else:
            _add(engine, place, gate, item, dtype)
            gate = None
        for source in read:
            for stored in stored_arrays(checkpoint, source.name):
                _give_back(stored)
        read = []


def _split(spec: ModelSpec, needs: Sequence[TensorNeed]) -> tuple[list[Place], list[TensorNeed]]:
    """The needs in the engine's order and in its parts, and where each goes.

    q, k, v, gate and up are parts of their own, since they may be stored in different types; so is every expert, its
    gate and up one after the other.
    """
    places: list[Place] = []
    parts: list[TensorNeed] = []

    def put(need: TensorNeed, name: str, part: int, source: Source) -> None:
        rows, *width = source.shape
        first, last = source.rows or (0, rows)
        shape = (last - first, *width) if len(width) < 2 else ((last - first) * width[0], width[1])
        put_whole(TensorNeed(f"{need.name}.{len(parts)}", shape, (source,)), name, part)

    def put_whole(need: TensorNeed, name: str, part: int = 0) -> None:
        words = need.name.split(".")
        places.append(Place(int(words[1]) if words[0] == "layers" else -1, name, part))
        parts.append(need)

    q_size, kv_size = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    up: list[Source] = []
    for need in needs:
        name = need.name.rpartition(".")[2]
        if name in ("qkv", "qkv_bias"):
            for part, source in enumerate(_cut(need, [q_size, kv_size, kv_size])):
                put(need, "qkv", part, source)
        elif name == "gate_up":
            for source in _cut(need, [need.shape[0] // 2] * 2):
                put(need, name, 0, source)
        elif name == "experts_gate":
            gate = _experts(need)
            up = _experts(next(n for n in needs if n.name == need.name.replace("_gate", "_up")))
            for part, pair in enumerate(zip(gate, up, strict=True)):
                for source in pair:
                    put(need, "experts_gate_up", part, source)
        elif name == "experts_down":
            for part, source in enumerate(_experts(need)):
                put(need, name, part, source)
        elif name != "experts_up":
            put_whole(need, name.removesuffix("_bias"))
    return places, parts


def _cut(need: TensorNeed, rows: list[int]) -> list[Source]:
    """The sources of parts of `rows` rows: as the checkpoint has them, or slices of the one tensor it has."""
    if len(need.sources) == len(rows):
        return list(need.sources)
    ends = np.cumsum(rows).tolist()
    whole = need.sources[0]
    return [
        Source(whole.name, whole.shape, whole.rope_heads, (end - n, end)) for n, end in zip(rows, ends, strict=True)
    ]


def _experts(need: TensorNeed) -> list[Source]:
    """One source an expert: as the checkpoint has them, or slices of its one tensor of three dimensions."""
    if len(need.sources) > 1 or len(need.sources[0].shape) < 3:
        return list(need.sources)
    whole = need.sources[0]
    return [Source(whole.name, whole.shape, rows=(expert, expert + 1)) for expert in range(whole.shape[0])]


def _add(engine: _native.Engine, place: Place, first: Loaded, second: Loaded | None, dtype: str) -> None:
    """Pack one matrix, or two of equal size into common panels."""
    packed = [one for item in (first, second) if item is not None for one in item.parts if isinstance(one, Packed)]
    if packed:
        if (place.name not in _PAIRED or len(packed) == 2) and _fit(packed):
            return _add_grouped(engine, place, packed)
        first, second = _numbers(first), second and _numbers(second)
    rows, columns = first.array.shape[0], _columns(first)
    if second is not None and second.dtype != first.dtype:
        first, second = _widened(first), _widened(second)
    items = [first] if second is None else [first, second]
    stored, wish = first.dtype, ""
    if stored not in PACKED:
        wish = "g8" if stored == _FINE else _plain_format(place, dtype)
        if stored != "BF16" or wish != "bf16":
            items, stored = [_widened(item) for item in items], "F32"
    data = [np.ascontiguousarray(item.array).reshape(-1).view(np.uint8) for item in items]
    other = data[1] if second else _NO_BYTES
    mapped = all(_file(one) is not None for one in data)
    engine.add_matrix(place.layer, place.name, place.part, stored, wish, rows, columns, data[0], other, mapped)


def _plain_format(place: Place, dtype: str) -> str:
    """The engine's format for a matrix that is not packed in the checkpoint."""
    if place.name == "router":
        return "f32"
    return "g8" if dtype == "int4" and place.name in ("embed", "head") else FORMATS[dtype]


def held_bytes(
    spec: ModelSpec, needs: Sequence[TensorNeed], checkpoint: Checkpoint, dtype: str, as_stored: bool
) -> int:
    """Bytes of all weights in an engine of `build_native`, told before anything is read."""
    total = 0.0
    for place, part in zip(*_split(spec, needs), strict=True):
        info = checkpoint.info(part.sources[0].name)
        if len(part.shape) == 1:
            total += 4 * part.shape[0]
        elif info.dtype in QUANTISED and info.dtype != "FP8" and dtype != "float32":
            total += info.nbytes * math.prod(part.shape) / math.prod(info.shape)
        else:
            kept = info.dtype in PACKED and as_stored and dtype != "float32"
            plain = "g8" if info.dtype == "FP8" and dtype != "float32" else _plain_format(place, dtype)
            rows, columns = (-(-size // _BLOCK) * _BLOCK for size in part.shape)
            bits = _BITS[info.dtype if kept else plain]
            if plain == "g8" and not kept:
                bits += 16 / math.gcd(columns, 128)
            total += rows * columns * bits / 8
    return int(total)


def _fit(packed: list[Packed]) -> bool:
    """Whether the engine holds these as they are: integers, whole groups, the same layout for both of a pair.

    Halves of a pair whose columns lie in different orders read different activations, so they have no common panels.
    """
    first, last = packed[0], packed[-1]
    if (first.kind, first.shape, first.columns) != (last.kind, last.shape, last.columns):
        return False
    if not np.array_equal(_order(first), _order(last)):
        return False
    for one in packed:
        if one.kind == "fp8" or one.rows != 1 or (one.columns % _BLOCK and one.columns != one.shape[1]):
            return False
        if not np.isfinite(_halves(one.scales_RG)).all():
            return False
    return True


def _add_grouped(engine: _native.Engine, place: Place, packed: list[Packed]) -> None:
    """Pack codes as they are, with a scale and where there are any a zero for each group."""
    zeros = any(one.zeros_RG is not None for one in packed)
    arrays = []
    for one in packed:
        parts = (one.codes, _halves(one.scales_RG), zeros_of(one) if zeros else _NO_BYTES)
        arrays.append([np.ascontiguousarray(part).reshape(-1).view(np.uint8) for part in parts])
    first, second = arrays[0], arrays[1] if len(arrays) == 2 else []
    one = packed[0]
    group = -(-one.columns // _BLOCK) * _BLOCK
    mapped = all(_file(codes) is not None for codes, *_ in arrays)
    tag = "INT4" if one.kind == "int4" else "INT8"
    engine.add_grouped(*place, tag, group, *one.shape, first, second, _order(one), mapped)


def _order(packed: Packed) -> Array:
    return _NO_ORDER if packed.order_I is None else packed.order_I


def _halves(scales_RG: Array) -> Array:
    with np.errstate(over="ignore"):
        return scales_RG.astype(np.float16)


def _numbers(item: Loaded) -> Loaded:
    """What the engine cannot hold as it is, as numbers for 8 bits: finer than 4 bits or FP8 themselves."""
    part = item.parts[0] if item.parts else None  # each need here has one source
    return Loaded(item.name, part.dequantize(), _FINE) if isinstance(part, Packed) else item


def _columns(item: Loaded) -> int:
    if item.dtype != _FINE and is_block_type(item.dtype):
        kind = ggml.BY_NAME[item.dtype]
        return int(item.array.shape[1]) // kind.nbytes * kind.block
    return int(item.array.shape[1])


def _widened(item: Loaded) -> Loaded:
    if item.dtype == _FINE:
        return item._replace(dtype="F32")
    return Loaded(item.name, to_float32(item.array, item.dtype), "F32")


def _file(array: Array) -> mmap.mmap | None:
    """The mapped file that an array is a view of; None when there is none."""
    base: object = array
    while isinstance(base, np.ndarray) and base.base is not None:
        base = base.base
    if isinstance(base, memoryview):
        base = base.obj
    return base if isinstance(base, mmap.mmap) else None


def _give_back(array: Array) -> None:
    """Take the pages of a mapped file that hold `array` out of this process's memory; they stay in the page cache."""
    file = _file(array)
    if file is not None:
        start = array.ctypes.data - np.frombuffer(file, np.uint8).ctypes.data
        first = start // mmap.PAGESIZE * mmap.PAGESIZE
        file.madvise(mmap.MADV_DONTNEED, first, start + array.nbytes - first)
