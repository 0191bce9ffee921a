"""The start of a step: tables, parameters, tokens, decode items, tiles and samples, against plain Python."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from octavo.attention.base import AttentionShape
from octavo.attention.triton import cut_for
from octavo.kernels.gpu.step import (
    C_BEGIN,
    C_ITEM,
    C_ITEMS,
    C_KEYS,
    C_TOKENS,
    M_ITEMS,
    M_SHARE,
    M_TILES,
    M_WORKERS,
    Cut,
)
from octavo.scheduler import plan as plan_format
from tests.kernels_interpret.cases.common import Case, make_case

CUT = Cut(workers=12, block=16, tile=8, alone=True)


def columns(case: Case, column: object) -> list[int]:
    return case.step.rows_CR[column.value].tolist()  # type: ignore[attr-defined]


def test_the_kernels_know_the_plan_format() -> None:
    assert plan_format.HEADER_WORDS == 32
    assert [plan_format.SECTIONS.index(name) for name in ("rows", "table", "params", "tokens")] == [0, 1, 5, 7]
    assert plan_format.PARAM_WORDS == 16
    assert plan_format.SAMPLE == 1


@pytest.mark.parametrize(
    ("decodes", "chunks"),
    [([5], []), ([100, 3, 15, 16, 64], []), ([7, 200], [(0, 30), (17, 9)]), ([], [(0, 1), (40, 70)])],
)
def test_tokens(decodes: list[int], chunks: list[tuple[int, int]]) -> None:
    case = make_case(decodes, chunks, CUT, tokens=150, lanes=8)
    total = sum(case.lengths)
    positions = [s + i for s, n in zip(case.starts, case.lengths, strict=True) for i in range(n)]
    rows = [row for row, n in zip(case.rows, case.lengths, strict=True) for _ in range(n)]
    assert case.step.ids_T[:total].tolist() == case.ids
    assert case.step.positions_T[:total].tolist() == positions
    want = [int(case.tables_SM[row, p // 16]) * 16 + p % 16 for row, p in zip(rows, positions, strict=True)]
    assert case.step.slots_T[:total].tolist() == want
    assert not case.step.slots_T[total:].any() and not case.step.ids_T[total:].any()
    assert case.params_SP[case.rows, 1].tolist() == case.starts
    samples = case.step.samples_3R
    ends = torch.tensor(case.lengths).cumsum(0) - 1
    assert samples[0, : len(ends)].tolist() == ends.tolist()
    assert samples[1, : len(ends)].tolist() == case.rows
    assert samples[2, : len(ends)].tolist() == [s + n for s, n in zip(case.starts, case.lengths, strict=True)]


def test_only_flagged_rows_are_samples() -> None:
    case = make_case([9, 9], [(0, 4), (0, 5), (0, 6)], CUT, lanes=8, sampled=[0, 1, 3])
    assert case.step.samples_3R[0].tolist() == [0, 1, 10, 0, 0, 0, 0, 0]
    assert int(case.step.meta[6]) == 3


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("shared", [0, 32])
@pytest.mark.parametrize("decodes", [[500], [40, 47, 300, 33, 96], [32] * 8])
def test_items_cover_all_keys_once(decodes: list[int], shared: int, alone: bool) -> None:
    case = make_case(decodes, [], replace(CUT, alone=alone), shared=shared)
    step = case.step
    begin, keys, own, counts = (columns(case, column) for column in (C_BEGIN, C_KEYS, C_ITEM, C_ITEMS))
    workers, share, count = (int(step.meta[word.value]) for word in (M_WORKERS, M_SHARE, M_ITEMS))
    assert 0 < workers <= CUT.workers and count == sum(counts[: len(decodes)])
    items, at = step.items_I8[:count].tolist(), begin[0]
    for number, (lane, row, lo, hi, length, part, parts, place) in enumerate(items):
        assert row == case.rows[lane] and length == keys[lane]
        assert (parts, place, part) == (counts[lane], own[lane], number - own[lane])
        assert lo == (begin[lane] if part == 0 else at) and hi > lo
        assert hi == keys[lane] if part == parts - 1 else (hi - begin[lane]) % CUT.block == 0
        at = hi
    blocks = [-(-(hi - lo) // CUT.block) for _, _, lo, hi, *_ in items]
    if alone:
        assert max(blocks) <= share
        return
    first = step.first_W[: workers + 1].tolist()
    assert first[0] == 0 and first[-1] == count and first == sorted(set(first))
    each = [sum(blocks[a:b]) for a, b in zip(first, first[1:], strict=False)]
    assert all(one == share for one in each[:-1]) and 0 < each[-1] <= share


def test_tiles_cover_all_chunk_tokens_once() -> None:
    case = make_case([3], [(0, 30), (5, 8), (100, 1)], CUT)
    tiles = int(case.step.meta[M_TILES.value])
    assert sorted(case.step.tiles_2Q[:, :tiles].T.tolist()) == [[1, 0], [1, 8], [1, 16], [1, 24], [2, 0], [3, 0]]
    assert columns(case, C_TOKENS) == [1, 30, 8, 1]


def test_a_step_of_single_tokens_is_decoding_whoever_feeds_them() -> None:
    case = make_case([3], [(40, 1), (100, 1)], CUT)
    assert case.step.meta[[2, M_TILES.value]].tolist() == [3, 0]
    assert case.step.ids_T.tolist() == case.ids
    assert make_case([3], [(40, 1), (100, 2)], CUT).step.meta[2] == 1


@pytest.mark.parametrize("kv_heads", [1, 2, 8, 40])
@pytest.mark.parametrize("fp8", [True, False])
def test_cuts_use_the_device_and_split_no_more_than_that(kv_heads: int, fp8: bool) -> None:
    shape = AttentionShape(2 * kv_heads, kv_heads, 128, 1.0)
    for lanes in range(1, 1025):
        cut = cut_for(shape, torch.bfloat16, lanes, 132, fp8)
        assert cut.workers * kv_heads > 132 * 3 or kv_heads == 40
        assert cut.workers <= max(2 * lanes, 132 * 6 // kv_heads)
        assert cut.alone or (not fp8 and cut.workers < 3 * lanes)
