"""The tensors that `octavo quantize` writes are those that another packer makes of the same codes."""

from __future__ import annotations

import numpy as np

from octavo.quantization.export import to_awq, to_gptq
from octavo.quantization.packed import pack_nibbles

OUTPUTS, INPUTS, GROUP = 8, 64, 32
# What GPTQModel 7.7.0 (TorchLinear and AwqTorchLinear, pack) makes of `example`.
GPTQ_FIRST = [1392285232, 3074550661, 497496282, 1930204463, 3646090100, 1068974281, 2501743902, 4218682227]
GPTQ_LAST = [3665043128, 3074550661, 2502932562, 1930204463, 1373266940, 1068974281, 496311702, 4218682227]
GPTQ_ZEROS = [[1948100417], [3378773142]]  # its second version; the first, which is written, has one less each
AWQ_FIRST = [972416160, 2083002323, 2958777094, 4104035897, 935449212, 2063865263, 3208075730, 4084964629]
AWQ_LAST = [972385320, 2083037019, 2958807950, 4104001201, 935418612, 2063899943, 3208106330, 4084929949]
AWQ_ZEROS = [[1906593137], [3338245062]]


def example() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(packed codes, scales, zeros) by a formula."""
    output, column = np.mgrid[:OUTPUTS, :INPUTS]
    codes = (5 * output + 3 * column + output * column // 7) % 16
    output, group = np.mgrid[:OUTPUTS, : INPUTS // GROUP]
    scales = ((1 + output % 3 + group) / 64).astype(np.float16)
    return pack_nibbles(codes.astype(np.uint8)), scales, ((3 * output + 5 * group) % 15 + 1).astype(np.uint8)


def test_gptq() -> None:
    codes, scales, zeros = example()
    made = to_gptq(codes, scales, zeros, GROUP)
    words = made["qweight"].view(np.uint32)
    assert words.shape == (8, 8) and words[0].tolist() == GPTQ_FIRST and words[-1].tolist() == GPTQ_LAST
    assert (made["qzeros"].view(np.uint32) + np.uint32(0x11111111)).tolist() == GPTQ_ZEROS
    np.testing.assert_array_equal(made["scales"], scales.T)
    assert made["g_idx"].tolist() == [0] * 32 + [1] * 32


def test_awq() -> None:
    codes, scales, zeros = example()
    made = to_awq(codes, scales, zeros)
    words = made["qweight"].view(np.uint32)
    assert words.shape == (64, 1) and words[:8, 0].tolist() == AWQ_FIRST and words[-8:, 0].tolist() == AWQ_LAST
    assert made["qzeros"].view(np.uint32).tolist() == AWQ_ZEROS
    np.testing.assert_array_equal(made["scales"], scales.T)
