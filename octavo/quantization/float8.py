"""8-bit floats as tables of all their values, for numpy, which has no such type."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def _table(exponent_bits: int, finite: bool) -> npt.NDArray[np.float32]:
    """All 256 values of an 8-bit float. `finite`: no infinities and one NaN code a sign (the "FN" kind)."""
    code = np.arange(256)
    mantissa_bits = 7 - exponent_bits
    exponent = (code & 127) >> mantissa_bits
    mantissa = (code & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
    bias = (1 << (exponent_bits - 1)) - 1
    value = np.where(exponent == 0, mantissa * 2.0 ** (1 - bias), (1 + mantissa) * 2.0 ** (exponent - bias))
    top = (1 << exponent_bits) - 1
    if finite:
        value = np.where((code & 127) == 127, np.nan, value)
    else:
        value = np.where(exponent == top, np.where(mantissa == 0, np.inf, np.nan), value)
    return np.where(code < 128, value, -value).astype(np.float32)


E4M3 = _table(4, finite=True)
E5M2 = _table(5, finite=False)
