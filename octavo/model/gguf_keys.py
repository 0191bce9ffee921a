"""From the metadata of a GGUF file to a `ModelSpec`. Keys: the GGUF specification, "Standardized key-value pairs"."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from octavo.errors import ModelError
from octavo.files import field
from octavo.model.families.common import size
from octavo.model.spec import LayerSpec, ModelSpec, RopeSpec

ARCHITECTURES = ("llama", "qwen3")


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
    head_dim = size(keys, "attention.key_length", hidden // heads)
    if field(keys, "rope.dimension_count", int, head_dim) != head_dim:
        raise ModelError(f"The file rotates {keys['rope.dimension_count']} of {head_dim} values of a head.", "")
    names = set(tensors)
    layer = LayerSpec(
        mlp_size=size(keys, "feed_forward_length"),
        qkv_bias="blk.0.attn_q.bias" in names,
        o_bias="blk.0.attn_output.bias" in names,
        mlp_bias="blk.0.ffn_down.bias" in names,
        qk_norm="blk.0.attn_q_norm.weight" in names,
    )
    tokens = metadata.get("tokenizer.ggml.tokens")
    bos = field(metadata, "tokenizer.ggml.bos_token_id", int, None)
    ends = [field(metadata, f"tokenizer.ggml.{kind}_token_id", int, None) for kind in ("eos", "eot", "eom")]
    return ModelSpec(
        architecture=arch,
        vocab_size=len(tokens) if isinstance(tokens, list) else size(keys, "vocab_size"),
        hidden_size=hidden,
        heads=heads,
        kv_heads=size(keys, "attention.head_count_kv", heads),
        head_dim=head_dim,
        layers=(layer,) * size(keys, "block_count"),
        max_positions=size(keys, "context_length"),
        norm_eps=field(keys, "attention.layer_norm_rms_epsilon", float),
        rope=_rope(keys, "rope_freqs.weight" in names),
        tied_head="output.weight" not in names,
        dtype="bfloat16",
        bos_id=bos,
        eos_ids=tuple(dict.fromkeys(token for token in ends if token is not None)),
    )


def _rope(keys: Mapping[str, Any], factors: bool) -> RopeSpec:
    theta = field(keys, "rope.freq_base", float, 10000.0)
    kind = field(keys, "rope.scaling.type", str, "none")
    if factors:
        return RopeSpec(theta, "factors")
    if kind == "none":
        return RopeSpec(theta)
    if kind != "linear":
        raise ModelError(f"The file's rope scaling {kind!r} is not supported.", "Supported: none, linear.")
    return RopeSpec(theta, "linear", field(keys, "rope.scaling.factor", float))
