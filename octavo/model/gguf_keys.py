"""From the metadata of a GGUF file to a `ModelSpec`. Keys: the GGUF specification, "Standardized key-value pairs".

Files hold norm weights as they are used (Gemma's too), and leave out what their writers took for known: windows of
Gemma that recur every so many layers, the base of its second rope, the normalised expert weights of Qwen 3.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from octavo.errors import ModelError
from octavo.files import field
from octavo.model.families.common import MAX_LAYERS, MAX_POSITIONS, number, size
from octavo.model.spec import LayerSpec, ModelSpec, RopeSpec

ARCHITECTURES = ("gemma2", "gemma3", "granite", "llama", "phi3", "qwen2", "qwen3", "qwen3moe")

# Of layers with a window in Gemma, every so many-th has none; the 27B model scales its scores in its own way.
_FULL_EVERY = {"gemma2": 2, "gemma3": 6}
_CONTROL = 3
_ENDS_OF_TURN = ("<end_of_turn>", "<|eot_id|>", "<|im_end|>", "<|end|>")
_GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3": 62}


def spec_from_gguf(metadata: Mapping[str, Any], tensors: Collection[str]) -> ModelSpec:
    """The spec of a GGUF model; `tensors` are the names of its tensors. Raises ModelError.

    `dtype` is bfloat16: block types have none of their own, and it is what they are widened to.
    """
    arch = field(metadata, "general.architecture", str)
    if arch not in ARCHITECTURES:
        raise ModelError(
            f"The file's architecture {arch!r} is not supported.", f"Supported: {', '.join(ARCHITECTURES)}."
        )
    keys = {key.removeprefix(f"{arch}."): value for key, value in metadata.items() if key.startswith(f"{arch}.")}
    hidden, heads = size(keys, "embedding_length"), size(keys, "attention.head_count")
    head_dim = size(keys, "attention.key_length", max(hidden // heads, 1))
    kv_heads = size(keys, "attention.head_count_kv", heads)
    if heads % kv_heads or head_dim % 2 or size(keys, "attention.value_length", head_dim) != head_dim:
        raise ModelError(
            f"The file has {heads} query heads, {kv_heads} key/value heads of {head_dim}, values of "
            f"{keys.get('attention.value_length', head_dim)}.",
            "Query heads must be a multiple of key/value heads, keys and values of one even size.",
        )
    if field(keys, "rope.dimension_count", int, head_dim) != head_dim:
        raise ModelError(f"The file rotates {keys['rope.dimension_count']} of {head_dim} values of a head.", "")
    names = set(tensors)
    base = ModelSpec(
        architecture=arch,
        vocab_size=_vocab_size(metadata, keys),
        hidden_size=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        layers=(_layer(keys, names),) * size(keys, "block_count", most=MAX_LAYERS),
        max_positions=size(keys, "context_length", most=MAX_POSITIONS),
        norm_eps=number(keys, "attention.layer_norm_rms_epsilon"),
        rope=_rope(keys, names),
        tied_head="output.weight" not in names,
        dtype="bfloat16",
        bos_id=field(metadata, "tokenizer.ggml.bos_token_id", int, None),
        eos_ids=_end_ids(metadata),
    )
    if any(not 0 <= token < base.vocab_size for token in base.eos_ids):
        raise ModelError(f"The file's end tokens {base.eos_ids} are outside its vocabulary of {base.vocab_size}.")
    return _with_family(base, keys)


def _vocab_size(metadata: Mapping[str, Any], keys: Mapping[str, Any]) -> int:
    tokens = metadata.get("tokenizer.ggml.tokens")
    return len(tokens) if isinstance(tokens, list) and tokens else size(keys, "vocab_size")


def _end_ids(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    """The ids that end a generation. Files without an end of turn: the control token that is known to be one."""
    ends = [field(metadata, f"tokenizer.ggml.{kind}_token_id", int, None) for kind in ("eos", "eot", "eom")]
    tokens, types = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.token_type", ())
    if ends[1] is None and isinstance(tokens, list) and len(types) == len(tokens):
        ends += [index for index, kind in enumerate(types) if kind == _CONTROL and tokens[index] in _ENDS_OF_TURN]
    return tuple(dict.fromkeys(token for token in ends if token is not None))


def _layer(keys: Mapping[str, Any], names: Collection[str]) -> LayerSpec:
    """What the tensors of the first layer tell of all layers."""
    experts = size(keys, "expert_count") if "blk.0.ffn_gate_inp.weight" in names else 0
    return LayerSpec(
        mlp_size=size(keys, "expert_feed_forward_length" if experts else "feed_forward_length"),
        qkv_bias="blk.0.attn_q.bias" in names,
        o_bias="blk.0.attn_output.bias" in names,
        mlp_bias="blk.0.ffn_down.bias" in names,
        qk_norm="blk.0.attn_q_norm.weight" in names,
        experts=experts,
        experts_per_token=size(keys, "expert_used_count", most=experts) if experts else 0,
    )


def _with_family(base: ModelSpec, keys: Mapping[str, Any]) -> ModelSpec:
    """What the family adds to the numbers that all families share."""
    arch, window = base.architecture, field(keys, "attention.sliding_window", int, 0)
    if arch == "qwen3moe":
        return replace(base, architecture="qwen3_moe")
    if arch == "phi3":
        return _phi3(base, keys, window)
    if arch == "granite":
        return replace(
            base,
            embed_scale=number(keys, "embedding_scale", 1.0),
            attention_scale=number(keys, "attention.scale", base.softmax_scale),
            residual_scale=number(keys, "residual_scale", 1.0),
            logit_scale=1.0 / number(keys, "logit_scale", 1.0),
        )
    if arch not in _FULL_EVERY:
        return base
    every = size(keys, "attention.sliding_window_pattern", _FULL_EVERY[arch])
    if not 0 < window <= MAX_POSITIONS:
        raise ModelError(f"The file's sliding window is {window}.", f"It must be from 1 to {MAX_POSITIONS}.")
    own = base.hidden_size // base.heads if len(base.layers) == _GEMMA_27B_LAYERS[arch] else base.head_dim
    return replace(
        base,
        layers=tuple(
            replace(layer, window=window if (index + 1) % every else 0) for index, layer in enumerate(base.layers)
        ),
        attention_scale=float(own) ** -0.5,
        embed_scale=math.sqrt(base.hidden_size),
        attention_softcap=_cap(keys, "attn_logit_softcapping"),
        logit_softcap=_cap(keys, "final_logit_softcapping"),
        window_rope=RopeSpec(number(keys, "rope.freq_base_swa", 10000.0)) if arch == "gemma3" else None,
        activation="gelu_tanh",
        post_norms=True,
        wide_norms=True,
    )


def _phi3(base: ModelSpec, keys: Mapping[str, Any], window: int) -> ModelSpec:
    """Stretched models: the short factors, up to the original context (see `octavo.model.families.phi3`)."""
    rope, positions = base.rope, base.max_positions
    if rope.kind == "factors":
        positions = size(keys, "rope.scaling.original_context_length", positions, MAX_POSITIONS)
        rope = replace(rope, magnitude=number(keys, "rope.scaling.attn_factor", 1.0))
    layers = tuple(replace(layer, window=max(window, 0)) for layer in base.layers)
    return replace(base, layers=layers, rope=rope, max_positions=min(positions, base.max_positions))


def _cap(keys: Mapping[str, Any], key: str) -> float:
    return number(keys, key) if key in keys else 0.0


def _rope(keys: Mapping[str, Any], names: Collection[str]) -> RopeSpec:
    theta = number(keys, "rope.freq_base", 10000.0)
    kind = field(keys, "rope.scaling.type", str, "none")
    if "rope_freqs.weight" in names or "rope_factors_short.weight" in names:
        return RopeSpec(theta, "factors")
    if kind == "none":
        return RopeSpec(theta)
    if kind == "linear":
        return RopeSpec(theta, "linear", number(keys, "rope.scaling.factor"))
    if kind == "yarn":
        return _yarn(keys, theta)
    raise ModelError(f"The file's rope scaling {kind!r} is not supported.", "Supported: none, linear, yarn.")


def _yarn(keys: Mapping[str, Any], theta: float) -> RopeSpec:
    factor = number(keys, "rope.scaling.factor")
    original = size(keys, "rope.scaling.original_context_length", most=MAX_POSITIONS)
    magnitude = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
    return RopeSpec(theta, "yarn", factor, original_positions=original, magnitude=magnitude)
