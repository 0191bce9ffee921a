"""NativeRunner: plans executed by the C++ engine on the processor, without torch.

`build_native` reads a model's weights into the engine's own packed layout, one tensor at a time; `NativeRunner` then
turns each plan into one native call (two or more for a step with rare rows). Device rows are numpy arrays: last
token, block table, parameter words. A launch computes at once and the ticket is the result.

Shape letters: S device rows (row 0 is padding), M table columns, R rows of a step, T its tokens, N rows that sample,
P parameter words, V padded vocabulary.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from octavo.errors import ConfigError, EngineError
from octavo.kernels.native import missing
from octavo.machine import usable_cores
from octavo.model.rotary import inverse_frequencies
from octavo.model.spec import ModelSpec
from octavo.quantization import ggml
from octavo.runner.base import StepResult, TokenLogprobs
from octavo.scheduler.plan import P_LOGPROBS, P_ROW, PARAM_WORDS, RARE, SAMPLE, X_BAN_UNTIL, PlanView
from octavo.weights.checkpoint import Array, Checkpoint, is_block_type, to_float32
from octavo.weights.load import Loaded, load
from octavo.weights.needs import Source, TensorNeed

if TYPE_CHECKING:
    from octavo.kernels.native import _native

KV_TYPES = ("bfloat16", "float32", "int8")

# Block types that the engine keeps as they are; others are widened to bfloat16.
PACKED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
# Wishes for plain weights -> the engine's format.
FORMATS = {"bfloat16": "bf16", "float16": "bf16", "float32": "f32", "int8": "q8", "int4": "q4m"}

_HEAD_ROWS = 16  # rows of logits that are looked at together in a step with rare rows
_NO_BYTES = np.empty(0, np.uint8)
_MATRICES = ("qkv", "o", "gate_up", "down", "embed", "head")


class Place(NamedTuple):
    """Where a need goes: layer (-1: none), name, part (q, k, v or gate, up), number of parts."""

    layer: int
    name: str
    part: int
    parts: int


def refusal(spec: ModelSpec) -> str:
    """Why the native engine cannot run a model; "" when it can."""
    odd = spec.activation != "silu" or spec.post_norms or spec.window_rope or spec.rope.magnitude != 1
    if odd or spec.architecture == "phi3" or any(layer.window or layer.experts for layer in spec.layers):
        return f"it does not know the layers of {spec.architecture}"
    if spec.head_dim % 16 or spec.head_dim > 256:
        return f"head_dim is {spec.head_dim}, not a multiple of 16 up to 256"
    if spec.heads // spec.kv_heads > 48:
        return f"{spec.heads // spec.kv_heads} query heads share one KV head, more than 48"
    return ""


class NativeRunner:
    """Runs a loaded engine; see `build_native`. `rows`: sequences at a time, `max_len`: tokens of the longest."""

    def __init__(self, engine: _native.Engine, *, blocks: int, block_size: int, rows: int, max_len: int) -> None:
        self.engine = engine
        self.blocks = blocks
        self.tables_SM = np.zeros((rows + 1, -(-max_len // block_size)), np.int32)
        self.params_SP = np.zeros((rows + 1, PARAM_WORDS), np.int32)
        self.last_token_S = np.zeros(rows + 1, np.int32)
        self.banned: dict[int, tuple[int, NDArray[np.int32]]] = {}  # row -> (position until which, ids)

    def launch(self, words: NDArray[np.int32]) -> StepResult:
        """Run one plan; see `octavo.runner.base.Runner`."""
        view = PlanView(words)
        if len(view.swap_in) or len(view.swap_out):
            raise EngineError("The native engine keeps no blocks outside its pool, but a plan swaps some.")
        if len(view.copies):
            self.engine.copy_blocks(np.ascontiguousarray(view.copies))
        self._apply(view)
        picked_N = np.flatnonzero(view.flags & SAMPLE).astype(np.int32)
        tokens_N = np.empty(len(picked_N), np.int32)
        bad_N = np.zeros(len(picked_N), np.uint8)
        result = StepResult(tokens_N)
        if view.rows:
            own_R = view.device_rows[: view.decode_rows]
            ids_T = np.concatenate((self.last_token_S[own_R], view.tokens)) if len(own_R) else view.tokens
            step = (ids_T, view.device_rows, view.start, view.length, picked_N, self.tables_SM)
            if (view.flags[picked_N] & RARE).any():
                self.engine.forward(*step)
                self._sample_rare(view, picked_N, result, bad_N)
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
            for row in rows.tolist():
                self.banned.pop(row, None)
            for row, kind, payload in view.extra_items():
                if kind == X_BAN_UNTIL:
                    self.banned[row] = (int(payload[0]), payload[1:].copy())
        if len(view.table):
            self.tables_SM[view.table[:, 0], view.table[:, 1]] = view.table[:, 2]

    def _sample_rare(
        self, view: PlanView, picked_N: NDArray[np.int32], result: StepResult, bad_N: NDArray[np.uint8]
    ) -> None:
        """Sample with some rows that need more than their parameter words: a few rows of logits at a time."""
        rows_N = view.device_rows[picked_N]
        position_N = view.start[picked_N] + view.length[picked_N]
        result.logprobs = {}
        for at in range(0, len(picked_N), _HEAD_ROWS):
            part = slice(at, min(at + _HEAD_ROWS, len(picked_N)))
            logits_NV = np.empty((part.stop - at, self.engine.padded_vocab), np.float32)
            self.engine.head(at, logits_NV, bad_N[part])
            rare = [i for i in range(at, part.stop) if view.flags[picked_N[i]] & RARE]
            raw_V = {i: self._ban(logits_NV[i - at], int(rows_N[i]), int(position_N[i])) for i in rare}
            params_NP = self.params_SP[rows_N[part]]
            self.engine.sample(logits_NV, params_NP, position_N[part], result.tokens[part])
            for i in rare:
                count = int(self.params_SP[rows_N[i], P_LOGPROBS])
                if count >= 0:
                    result.logprobs[i] = self._token_logprobs(raw_V[i], int(result.tokens[i]), count)

    def _ban(self, logits_V: NDArray[np.float32], row: int, position: int) -> NDArray[np.float32]:
        """Keep a row below its `min_tokens` from choosing an end token; returns the logits as they were."""
        until, ids = self.banned.get(row, (0, None))
        if ids is None or position >= until:
            return logits_V
        raw_V = logits_V.copy()
        logits_V[ids] = -np.inf
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
    dtype: str = "bfloat16",
    kv: str = "",
    threads: int = 0,
    isa: str = "",
) -> NativeRunner:
    """Load a model into a native engine with `blocks` KV blocks (the padding block included).

    dtype: for weights stored as plain numbers, one of FORMATS; "float32" also widens block types and is exact, all
    else keeps them as stored. kv: one of KV_TYPES, "" = float32 for float32 and else bfloat16. threads: 0 = the cores
    this process may use. isa: one of `kernel_sets()`, "" = the best. Raises ConfigError, ModelError.
    """
    if reason := missing() or refusal(spec):
        raise ConfigError(f"The native engine cannot run this model: {reason}.", "Use the torch back end.")
    kv = kv or ("float32" if dtype == "float32" else "bfloat16")
    if dtype not in FORMATS or kv not in KV_TYPES:
        known = f"{', '.join(FORMATS)}; KV: {', '.join(KV_TYPES)}"
        raise ConfigError(f"The native engine does not know the types {dtype!r} and {kv!r}.", f"Known: {known}.")
    from octavo.kernels.native import _native

    sizes = [spec.vocab_size, spec.hidden_size, spec.heads, spec.kv_heads, spec.head_dim, block_size, blocks]
    factors = [spec.norm_eps, spec.softmax_scale, spec.embed_scale, spec.residual_scale, spec.logit_scale]
    factors += [spec.attention_softcap, spec.logit_softcap]
    inverse = inverse_frequencies(spec.rope, spec.head_dim, _rope_factors(needs, checkpoint)).tolist()
    mlp = [layer.mlp_size for layer in spec.layers]
    try:
        engine = _native.Engine(sizes, mlp, factors, inverse, kv, threads or usable_cores(), isa)
        _load_weights(engine, needs, checkpoint, dtype)
        engine.ready()
    except ValueError as error:
        raise ConfigError(f"The native engine cannot run this model: {error}.", "Use the torch back end.") from None
    return NativeRunner(engine, blocks=blocks, block_size=block_size, rows=rows, max_len=max_len)


def _rope_factors(needs: Sequence[TensorNeed], checkpoint: Checkpoint) -> NDArray[np.float32] | None:
    for need in needs:
        if need.name == "rope_factors":
            name = need.sources[0].name
            return to_float32(checkpoint.read(name), checkpoint.info(name).dtype)
    return None


def _load_weights(engine: _native.Engine, needs: Sequence[TensorNeed], checkpoint: Checkpoint, dtype: str) -> None:
    """Hand every tensor to the engine. What was read of a mapped file is let go at once."""
    places, parts = _split(needs)
    packed = () if dtype == "float32" else [need.name for need in parts]
    gate: Loaded | None = None
    for place, item in zip(places, load(parts, checkpoint, packed), strict=True):
        if place.name == "rope_factors":
            continue
        if item.array.ndim == 1:
            engine.add_vector(place.layer, place.name, place.part, to_float32(item.array, item.dtype).ravel())
        elif place.name != "gate_up":
            _add(engine, place, item, None, dtype)
        elif gate is None:
            gate = item
            continue  # both halves are packed into the same panels
        else:
            _add(engine, Place(place.layer, place.name, 0, 1), gate, item, dtype)
            gate = None
        _let_go(item.array)


def _split(needs: Sequence[TensorNeed]) -> tuple[list[Place], list[TensorNeed]]:
    """One need for each part of a matrix, since parts may be stored in different types; and where each goes."""
    places, parts = [], []
    for need in needs:
        words = need.name.split(".")
        layer = int(words[1]) if len(words) == 3 else -1
        name = words[-1]
        if name not in _MATRICES:
            if name.endswith("_bias") and name.removesuffix("_bias") in _MATRICES:
                name = name.removesuffix("_bias")
            sources: list[tuple[Source, ...]] = [need.sources] if name != "qkv" else [(s,) for s in need.sources]
        else:
            sources = [(source,) for source in need.sources]
        for part, each in enumerate(sources):
            shape = (sum(source.shape[0] for source in each), *need.shape[1:])
            places.append(Place(layer, name, part, len(sources)))
            parts.append(TensorNeed(f"{need.name}.{part}", shape, each))
    return places, parts


def _add(engine: _native.Engine, place: Place, first: Loaded, second: Loaded | None, dtype: str) -> None:
    """Pack one matrix, or two of equal size into common panels."""
    rows, columns = first.array.shape[0], _columns(first)
    if second is not None and second.dtype != first.dtype:
        first, second = _widened(first), _widened(second)
    items = [first] if second is None else [first, second]
    stored, wish = first.dtype, ""
    if stored not in PACKED:
        wish = FORMATS[dtype]
        if stored != "BF16" or wish != "bf16":
            items, stored = [_widened(item) for item in items], "F32"
    data = [np.ascontiguousarray(item.array).reshape(-1).view(np.uint8) for item in items]
    engine.add_matrix(
        place.layer, place.name, place.part, stored, wish, rows, columns, data[0], data[1] if second else _NO_BYTES
    )


def _columns(item: Loaded) -> int:
    if is_block_type(item.dtype):
        kind = ggml.BY_NAME[item.dtype]
        return int(item.array.shape[1]) // kind.nbytes * kind.block
    return int(item.array.shape[1])


def _widened(item: Loaded) -> Loaded:
    return Loaded(item.name, to_float32(item.array, item.dtype), "F32")


def _let_go(array: Array) -> None:
    """Take the pages of a mapped file that hold `array` out of this process's memory; they stay in the page cache."""
    base: object = array
    while isinstance(base, np.ndarray) and base.base is not None:
        base = base.base
    if isinstance(base, memoryview):
        base = base.obj
    if isinstance(base, mmap.mmap):
        start = array.ctypes.data - np.frombuffer(base, np.uint8).ctypes.data
        first = start // mmap.PAGESIZE * mmap.PAGESIZE
        base.madvise(mmap.MADV_DONTNEED, first, start + array.nbytes - first)
