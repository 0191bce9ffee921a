"""4-bit matrices as the tensors that published AWQ and GPTQ checkpoints have: the inverse of `formats`.

Shape letters: I inputs, O outputs, G groups of inputs.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from octavo.errors import ConfigError
from octavo.quantization.formats import AWQ_COLUMNS
from octavo.quantization.packed import Array, pack_nibbles, unpack_nibbles


def to_awq(codes: Array, scales_OG: Array, zeros_OG: Array) -> dict[str, Array]:
    """AWQ "gemm" tensors of uint8 codes [O, I / 2]. ConfigError unless there is a multiple of 8 outputs."""
    if len(codes) % 8:
        raise ConfigError(f"A matrix has {len(codes)} outputs; AWQ needs a multiple of 8.", "Take --method gptq.")
    return {
        "qweight": _awq_words(unpack_nibbles(codes).T),
        "qzeros": _awq_words(zeros_OG.T),
        "scales": np.ascontiguousarray(scales_OG.T),
    }


def to_gptq(codes: Array, scales_OG: Array, zeros_OG: Array, group: int) -> dict[str, Array]:
    """GPTQ tensors (first version: zeros less one) of uint8 codes [O, I / 2]; ConfigError as for `to_awq`."""
    if len(codes) % 8:
        raise ConfigError(f"A matrix has {len(codes)} outputs; GPTQ needs a multiple of 8.", "Leave it as it is.")
    inputs = codes.shape[1] * 2
    codes, zeros_OG = _without_zero(codes, zeros_OG, group)
    words = np.ascontiguousarray(codes).reshape(len(codes), -1, 4).swapaxes(0, 1)
    return {
        "qweight": np.ascontiguousarray(words).view(np.int32)[..., 0],
        "qzeros": pack_nibbles(np.ascontiguousarray(zeros_OG.T) - np.uint8(1)).view(np.int32),
        "scales": np.ascontiguousarray(scales_OG.T),
        "g_idx": (np.arange(inputs) // group).astype(np.int32),
    }


def awq_config(group: int) -> dict[str, Any]:
    """The `quantization_config` of what `to_awq` makes."""
    return {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": None,
    }


def gptq_config(group: int) -> dict[str, Any]:
    """The `quantization_config` of what `to_gptq` makes."""
    return {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": group,
        "sym": False,
        "desc_act": False,
        "damp_percent": 0.01,
        "checkpoint_format": "gptq",
    }


def _awq_words(values: Array) -> Array:
    """uint8 [rows, 8 n] of 0 to 15 -> int32 [rows, n]."""
    words = np.zeros((len(values), values.shape[1] // 8), np.uint32)
    for place, column in enumerate(AWQ_COLUMNS):
        words |= values[:, column::8].astype(np.uint32) << np.uint32(4 * place)
    return words.view(np.int32)


def _without_zero(codes: Array, zeros_OG: Array, group: int) -> tuple[Array, Array]:
    """No zero of 0, which is stored as -1 and read in different ways: such groups move up by one code."""
    if zeros_OG.all():
        return codes, zeros_OG
    values_OGS = unpack_nibbles(codes).reshape(len(codes), -1, group)
    moved_OG = zeros_OG == 0
    values_OGS = np.where(moved_OG[..., None], np.minimum(values_OGS + 1, 15), values_OGS)
    return pack_nibbles(values_OGS.reshape(len(codes), -1)), np.where(moved_OG, np.uint8(1), zeros_OG)
