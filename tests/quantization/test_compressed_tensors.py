"""Tensors packed by the compressed-tensors library itself."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("compressed_tensors", reason="an oracle that is not installed")

from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

from octavo.quantization.formats import pack_quantized


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("asymmetric", [False, True])
def test_codes_and_zeros(bits: int, asymmetric: bool) -> None:
    g = torch.Generator().manual_seed(bits)
    half = 2 ** (bits - 1)
    codes = torch.randint(-half, half, (24, 128), generator=g, dtype=torch.int8)
    scales = torch.rand(24, 4, generator=g).half()
    zeros = torch.randint(-half, half, (24, 4), generator=g, dtype=torch.int8) if asymmetric else torch.zeros(24, 4)
    words = pack_to_int32(codes, bits).numpy()
    zero_words = pack_to_int32(zeros, bits, packed_dim=0).numpy() if asymmetric else None
    packed = pack_quantized(words, zero_words, scales.numpy(), None, 128)
    expected = (codes - zeros.float().repeat_interleave(32, 1)) * scales.float().repeat_interleave(32, 1)
    assert torch.equal(torch.from_numpy(packed.dequantize()), expected)


def test_a_whole_module(tmp_path: object) -> None:
    from compressed_tensors.compressors import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    g = torch.Generator().manual_seed(1)
    args = QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group", group_size=32)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    state = {"weight": torch.randn(16, 64, generator=g), "weight_scale": torch.rand(16, 2, generator=g) * 0.1 + 0.1}
    made = PackedQuantizationCompressor.compress(dict(state), scheme)
    packed = pack_quantized(made["weight_packed"].numpy(), None, state["weight_scale"].numpy(), None, 64)
    back = PackedQuantizationCompressor.decompress(dict(made), scheme)["weight"]
    torch.testing.assert_close(torch.from_numpy(packed.dequantize()), back.float(), atol=1e-6, rtol=1e-6)
