"""Sampling kernels against the sampler's definition, and thresholds against its filters."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from octavo.kernels.gpu.sample import sample
from octavo.kernels.gpu.step import StepTables
from octavo.runner import sampler
from octavo.scheduler.plan import (
    P_CHILD,
    P_MIN_P,
    P_SEED_HIGH,
    P_SEED_LOW,
    P_TEMPERATURE,
    P_TOP_K,
    P_TOP_P,
    PARAM_WORDS,
    float_bits,
    signed,
)

Row = dict[str, float]


def run(logits_NV: Tensor, rows: list[Row], **options: float) -> tuple[list[int], list[int]]:
    """Tokens of the kernels and of the definition. Row i of the logits belongs to device row i + 1."""
    count = len(rows)
    params = np.zeros((count + 1, PARAM_WORDS), np.int32)
    for i, row in enumerate(rows, 1):
        params[i, P_TEMPERATURE] = float_bits(row.get("temperature", 1.0))
        params[i, P_TOP_P] = float_bits(row.get("top_p", 1.0))
        params[i, P_MIN_P] = float_bits(row.get("min_p", 0.0))
        params[i, P_TOP_K] = int(row.get("top_k", 0))
        params[i, P_SEED_LOW], params[i, P_SEED_HIGH] = signed(0x9ABCDEF0 + i), signed(0xF0000001 * i & 0xFFFFFFFF)
        params[i, P_CHILD] = i % 3
    step = StepTables(count + 2, 1, 1, 1, 1, torch.device("cpu"))
    step.meta[6] = count
    step.samples_3R[1, :count] = torch.arange(1, count + 1)
    step.samples_3R[2, :count] = torch.arange(100, 100 + count)
    last, out = torch.zeros(count + 1, dtype=torch.int64), torch.full((len(logits_NV),), -7, dtype=torch.int32)
    filters = any(set(row) & {"top_k", "top_p", "min_p"} for row in rows)
    scale, softcap = options.get("scale", 1.0), options.get("softcap", 0.0)
    sample(logits_NV, step, torch.from_numpy(params), last, out, scale, softcap, filters)
    assert last[1:].tolist() == [max(t, 0) for t in out[:count].tolist()]
    wide = logits_NV[:count].float() * scale
    if softcap:
        wide = softcap * torch.tanh(wide / softcap)
    return out[:count].tolist(), [chosen(wide[i : i + 1], params[i + 1], 100 + i) for i in range(count)]


def chosen(logits_1V: Tensor, words: np.ndarray, position: int) -> int:
    def number(word: int) -> Tensor:
        return torch.from_numpy(words[word : word + 1].view(np.float32).copy())

    def integer(word: int) -> Tensor:
        return torch.tensor([int(words[word]) & 0xFFFFFFFF])

    if not logits_1V.isfinite().all():
        return -1
    if number(P_TEMPERATURE) <= 0:
        return int(logits_1V.argmax())
    rows = sampler.SamplingRows(
        number(P_TEMPERATURE), integer(P_TOP_K), number(P_TOP_P), number(P_MIN_P), integer(P_SEED_LOW),
        integer(P_SEED_HIGH), integer(P_CHILD), torch.tensor([position]),
    )  # fmt: skip
    return int(sampler.draw(logits_1V, rows, filters=True))


@pytest.mark.parametrize("vocab", [5, 3000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_plain(vocab: int, dtype: torch.dtype) -> None:
    torch.manual_seed(vocab)
    rows = [{"temperature": t} for t in (0.0, 0.6, 1.0, 5.0, 0.0)]
    got, want = run((torch.randn(7, vocab) * 3).to(dtype), rows)
    assert got == want


def test_scale_and_softcap() -> None:
    torch.manual_seed(1)
    got, want = run(torch.randn(4, 999) * 30, [{"temperature": 1.0}] * 4, scale=0.25, softcap=9.0)
    assert got == want


def test_ties_go_to_the_lower_id() -> None:
    logits = torch.zeros(2, 2500)
    logits[:, [700, 1300, 2400]] = 4.0
    assert run(logits, [{"temperature": 0.0}] * 2)[0] == [700, 700]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_not_finite(value: float) -> None:
    torch.manual_seed(2)
    logits = torch.randn(3, 2000)
    logits[1, 1999] = value
    got, want = run(logits, [{"temperature": 0.0}, {"temperature": 0.0}, {"temperature": 1.0}])
    assert got == want and got[1] == -1 and -1 not in (got[0], got[2])


FILTERS: list[Row] = [
    {"top_k": 1}, {"top_k": 7}, {"top_p": 0.3}, {"top_p": 0.9}, {"min_p": 0.2}, {"top_k": 40, "top_p": 0.8},
    {"top_k": 40, "top_p": 0.8, "min_p": 0.05, "temperature": 0.7}, {"top_p": 1e-9}, {"top_k": 10**6}, {},
    {"temperature": 0.0, "top_k": 3},
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_filters(dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    got, want = run((torch.randn(len(FILTERS), 600) * 3).to(dtype), FILTERS)
    assert got == want


def test_filters_among_ties_keep_the_lower_ids() -> None:
    """With few distinct values, draws at many seeds show which of equal logits may be chosen."""
    torch.manual_seed(4)
    values = torch.tensor([0.0, -0.0, 1.0, 2.0])[torch.randint(0, 4, (200,))]
    rows: list[Row] = [{"top_k": k} for k in range(60, 80)] + [{"top_p": p / 100} for p in range(60, 90, 3)]
    got, want = run(values.expand(len(rows), -1).contiguous(), rows)
    assert got == want
