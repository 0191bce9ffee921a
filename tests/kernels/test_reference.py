"""The oracles themselves, against torch's own functions and against their definitions."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import rms_norm, scaled_dot_product_attention

from octavo.kernels import reference

F64 = torch.float64


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = F64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64).to(dtype)


def test_rms_norm_and_add():
    x_TI, residual_TI, weight_I = randn(5, 24), randn(5, 24, seed=1), randn(24, seed=2)
    torch.testing.assert_close(reference.rms_norm(x_TI, weight_I, 1e-5), rms_norm(x_TI, (24,), weight_I, 1e-5))
    total, normed = reference.add_rms_norm(x_TI, residual_TI, weight_I, 1e-5)
    assert torch.equal(total, x_TI + residual_TI)
    torch.testing.assert_close(normed, rms_norm(total, (24,), weight_I, 1e-5))


def test_rms_norm_of_bfloat16_is_rounded_once():
    x_TI, weight_I = randn(9, 64, dtype=torch.bfloat16), randn(64, seed=2, dtype=torch.bfloat16)
    exact = reference.rms_norm(x_TI.double(), weight_I.double(), 1e-6)
    assert ((reference.rms_norm(x_TI, weight_I, 1e-6).double() - exact).abs() <= exact.abs() * 2**-8).all()


def test_attend_row_equals_torch():
    q, k, v = randn(7, 6, 16), randn(20, 2, 16, seed=1), randn(20, 2, 16, seed=2)
    mask = torch.ones(7, 20, dtype=torch.bool).tril(13)
    expected = scaled_dot_product_attention(
        q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), attn_mask=mask, scale=0.3, enable_gqa=True
    )
    torch.testing.assert_close(reference.attend_row(q, k, v, 0.3)[0], expected.transpose(0, 1))


@pytest.mark.parametrize("window", [1, 2, 8, 20, 99])
def test_window_of_w_sees_itself_and_w_minus_1_before(window):
    q, k, v = randn(20, 1, 8), randn(20, 1, 8, seed=1), torch.eye(20, dtype=F64)[:, None]
    seen = reference.attend_row(q, k, v, 1.0, window=window)[0][:, 0] > 0
    assert torch.equal(seen, torch.ones(20, 20, dtype=torch.bool).tril().triu(1 - window))


def test_softcap_bounds_the_scores():
    q, k, v = 100 * randn(1, 1, 8), randn(5, 1, 8, seed=1), randn(5, 1, 8, seed=2)
    scores = torch.tanh((k[:, 0] @ q[0, 0]) / 2.0) * 2.0
    torch.testing.assert_close(reference.attend_row(q, k, v, 1.0, softcap=2.0)[0][0, 0], scores.softmax(0) @ v[:, 0])


def test_no_keys_gives_zeros_and_minus_infinity():
    o_THD, lse_TH = reference.attend_row(randn(1, 2, 8), randn(0, 1, 8), randn(0, 1, 8), 1.0)
    assert not o_THD.any() and (lse_TH == -torch.inf).all()


def test_merging_parts_equals_all_keys_at_once():
    """Three disjoint parts, one of them empty."""
    q, k, v = randn(1, 4, 16), randn(30, 2, 16, seed=1), randn(30, 2, 16, seed=2)
    parts = [reference.attend_row(q, k[a:b], v[a:b], 0.25) for a, b in ((0, 11), (11, 11), (11, 30))]
    o_THD, lse_TH = reference.merge_by_lse(*(torch.stack(column) for column in zip(*parts, strict=True)))
    expected_o, expected_lse = reference.attend_row(q, k, v, 0.25)
    torch.testing.assert_close(o_THD, expected_o)
    torch.testing.assert_close(lse_TH, expected_lse)


def test_rotation_keeps_lengths_and_depends_on_distance_only():
    angles_TF = torch.arange(10, dtype=F64)[:, None] * torch.tensor([1.0, 0.3, 0.01], dtype=F64)
    cos, sin = angles_TF.cos(), angles_TF.sin()
    tables = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
    q, k = randn(6).expand(10, 1, 6), randn(6, seed=1).expand(10, 1, 6)
    q_TD, k_TD = (reference.rotate(x, *tables)[:, 0] for x in (q, k))
    torch.testing.assert_close(q_TD.norm(dim=-1), q[:, 0].norm(dim=-1))
    dots = q_TD @ k_TD.T
    torch.testing.assert_close(dots[5, 2], dots[9, 6])
    torch.testing.assert_close(q_TD[0], q[0, 0])


def test_norm_rotate_write_is_its_parts():
    q, k, v = randn(3, 4, 8), randn(3, 2, 8, seed=1), randn(3, 2, 8, seed=2)
    cos, sin, weights = randn(3, 8, seed=3), randn(3, 8, seed=4), (randn(8, seed=5), randn(8, seed=6))
    keys, values, slots = randn(5, 2, 4, 8), randn(5, 2, 4, 8), torch.tensor([7, 19, 8])
    got = reference.norm_rotate_write(q, k, v, (*weights, 1e-6), cos, sin, keys, values, slots)
    torch.testing.assert_close(got, reference.rotate(rms_norm(q, (8,), weights[0], 1e-6), cos, sin))
    rotated = reference.rotate(rms_norm(k, (8,), weights[1], 1e-6), cos, sin)
    for token, slot in enumerate(slots.tolist()):
        torch.testing.assert_close(keys[slot // 4, :, slot % 4], rotated[token])
        assert torch.equal(values[slot // 4, :, slot % 4], v[token])


def test_copy_blocks_reads_before_it_writes():
    data = randn(2, 2, 4, 1, 2, 3)
    before = data.clone()
    reference.copy_blocks(data, torch.tensor([1, 2]), torch.tensor([2, 1]))
    assert torch.equal(data[:, :, [1, 2]], before[:, :, [2, 1]]) and torch.equal(data[:, :, 3], before[:, :, 3])
