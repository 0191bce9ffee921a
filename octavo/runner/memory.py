"""What a model takes on a device, by arithmetic: the same for `octavo plan`, which has no files, and for the engine.

Pure: from the list of needed tensors and how they are quantised, nothing is read and torch is not imported.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from octavo.config import GIB, EngineConfig, Facts, Hardware, ModelFacts, resolve, step_limits
from octavo.errors import ConfigError
from octavo.model.spec import ModelSpec
from octavo.quantization.scheme import Scheme, online_group
from octavo.weights.checkpoint import QUANTISED, Checkpoint
from octavo.weights.needs import Source, TensorNeed
from octavo.weights.quantized import QuantizedCheckpoint

ELEMENT_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}

GRAPH_MARGIN = 768 << 20
"""bytes of all graphs themselves and of the captured mixed steps"""
STEP_BASE = 400 << 20
"""bytes of libraries' workspaces, loaded kernels, the attention's partial results and buffers of the runner"""

LAYER_PRODUCTS = ("qkv", "o", "gate_up", "down")
"""the matrices of a layer that only products use, and which so can be quantised"""


def weight_bytes(
    needs: Sequence[TensorNeed],
    dtype: str,
    *,
    scheme: Scheme | None = None,
    stored: Checkpoint | None = None,
    quantization: str = "",
) -> dict[str, int]:
    """Bytes of all weights on a device by their kind: `dtype`, "float32" for what stays wide, "int4", "int8", "fp8".

    The checkpoint's own quantisation is told by its files (`stored`), or by its configuration alone (`scheme`).
    `quantization`: what its plain matrices become while they are loaded.
    """
    if isinstance(stored, QuantizedCheckpoint):
        scheme = stored.scheme
    total: dict[str, int] = {}
    for need in needs:
        name = need.name.rpartition(".")[2]
        width = need.shape[-1]
        for source in need.sources:
            rows = _rows(source)
            kind = kept_dtype(need, dtype)
            count = math.prod((rows, width)[: len(need.shape)]) * ELEMENT_BYTES[kind]
            if name in (*LAYER_PRODUCTS, "head") and scheme is not None and _quantised(source, scheme, stored):
                kind, count = scheme.kind, quantised_bytes(rows, width, scheme)
            elif name in LAYER_PRODUCTS and quantization:
                kind, count = quantization, online_bytes(rows, width, quantization)
            total[kind] = total.get(kind, 0) + count
    return total


def kept_dtype(need: TensorNeed, dtype: str) -> str:
    """The dtype that a plain tensor of a model in `dtype` is kept in."""
    return "float32" if need.wide and ELEMENT_BYTES[dtype] < 4 else dtype


def model_facts(spec: ModelSpec, dtype: str, kv: str = "") -> ModelFacts:
    """What `octavo.config.resolve` must know; `kv` as in `kv_bytes_per_token`. Of experts only the chosen are met."""
    idle = sum((layer.experts - layer.experts_per_token) * layer.mlp_size for layer in spec.layers)
    met = spec.parameters - 3 * spec.hidden_size * idle
    return ModelFacts(spec.max_positions, kv_bytes_per_token(spec, dtype, kv), dtype, met)


def kv_bytes_per_token(spec: ModelSpec, dtype: str, kv: str = "") -> int:
    """Bytes of one token in the KV cache, all layers, keys and values; `kv`: "fp8", "int8", or "" for `dtype`."""
    head = 2 * spec.head_dim * (1 if kv else ELEMENT_BYTES[dtype])
    if kv == "int8":
        head += 2 * 4  # a scale of its own for each key and value
    return len(spec.layers) * spec.kv_heads * head


def step_bytes(spec: ModelSpec, dtype: str, tokens: int, rows: int, longest: int) -> int:
    """Bytes that the largest step takes on a CUDA device: activations, the sampler's logits, tables, libraries."""
    element = ELEMENT_BYTES[dtype]
    q_size, kv_size = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    mlp = max(layer.mlp_size * max(layer.experts_per_token, 1) for layer in spec.layers)
    attention = q_size + 2 * kv_size + 2 * q_size
    activations = tokens * element * (2 * spec.hidden_size + max(attention, 3 * mlp))
    logits = rows * spec.vocab_size * element
    tables = longest * spec.head_dim * 4 + rows * (longest // 16) * 4
    return activations + logits + tables + STEP_BASE


def graph_bytes(spec: ModelSpec, dtype: str, rows: int) -> int:
    """Bytes kept free for captured graphs and what they hold."""
    return GRAPH_MARGIN + rows * spec.vocab_size * ELEMENT_BYTES[dtype]


def quantised_bytes(outputs: int, inputs: int, scheme: Scheme) -> int:
    """Bytes of one matrix of a quantised checkpoint, as it is held."""
    codes = outputs * inputs * scheme.bits // 8
    if scheme.kind == "fp8":
        blocks = -(-outputs // 128) * -(-inputs // 128)
        return codes + 4 * (blocks if scheme.group else outputs)
    groups = outputs * (inputs // scheme.group if scheme.group else 1)
    return codes + groups * (3 if scheme.zeros else 2) + (4 * inputs if scheme.ordered else 0)


def online_bytes(outputs: int, inputs: int, kind: str) -> int:
    """Bytes of one plain matrix that was quantised while loading."""
    if kind != "int4":
        return outputs * inputs + 4 * outputs
    return outputs * inputs // 2 + 3 * outputs * (inputs // online_group(inputs))


def _rows(source: Source) -> int:
    shape = source.shape if source.rows is None else (source.rows[1] - source.rows[0], *source.shape[1:])
    return math.prod(shape[:-1]) if len(shape) > 1 else shape[0]


def _quantised(source: Source, scheme: Scheme, stored: Checkpoint | None) -> bool:
    if stored is not None:
        return stored.info(source.name).dtype in QUANTISED
    return source.name.endswith(".weight") and scheme.covers(source.name.removesuffix(".weight"))


def memory_share(config: EngineConfig) -> float:
    """The share of the card's memory that an engine may use. ConfigError: not a share."""
    share = config.cache.gpu_memory_utilization
    if not 0.05 <= share <= 1.0:
        raise ConfigError(f"gpu_memory_utilization is {share}.", "Give a share of the card's memory, 0.05 to 1.")
    return share


@dataclass(frozen=True, slots=True)
class CardMemory:
    """The card: bytes in all, bytes that this engine may use, and bytes of the weights as they are to be loaded."""

    config: EngineConfig
    total: int
    budget: int
    weights: int = 0

    def resolve(self, model: ModelFacts, left: int, taken: str) -> Facts:
        """The engine's numbers with `left` bytes for the KV cache; ConfigError says what `taken` leaves."""
        try:
            facts = resolve(self.config, Hardware("cuda", max(left, 0)), model)
        except ConfigError as error:
            raise self._too_small(model, left, taken, error.cause) from None
        if facts.blocks * facts.kv_bytes_per_block > left:
            wanted = facts.blocks * facts.kv_bytes_per_block
            raise self._too_small(model, left, taken, f"The KV cache asked for takes {gib(wanted)}.")
        return facts

    def _too_small(self, model: ModelFacts, left: int, taken: str, cause: str) -> ConfigError:
        """Needs, has, and what would help, the most effective first."""
        cache = self.config.cache
        longest = self.config.model.max_model_len or model.max_positions
        _, tokens = step_limits(self.config, "cuda")
        fixes = {
            "raise --gpu-memory-utilization to 0.95": (0.95 - cache.gpu_memory_utilization) * self.total,
            f"lower --max-model-len from {longest} to {longest // 2}": longest // 2 * model.kv_bytes_per_token,
            f"lower --max-num-batched-tokens from {tokens} to 2048": 1.0 * GIB,
        }
        if cache.kv_cache_dtype == "auto":
            fixes["give --kv-cache-dtype fp8"] = longest * model.kv_bytes_per_token / 2
        if self.weights and not self.config.model.quantization:
            fixes["give --quantization fp8"] = self.weights * 0.45
            fixes["take a 4-bit checkpoint of the model"] = self.weights * 0.68
        ranked = sorted(fixes.items(), key=lambda item: -item[1])
        text = "; or ".join(f"{fix} ({gib(effect)})" for fix, effect in ranked if effect > 0)
        have = f"This engine may use {gib(self.budget)} of the card's {gib(self.total)}; {taken} leave {gib(left)}"
        return ConfigError(f"{have} for the KV cache. {cause}", f"{text[:1].upper()}{text[1:]}.")


def gib(count: float) -> str:
    """A number of bytes in words."""
    return f"{count / GIB:.2f} GiB"
