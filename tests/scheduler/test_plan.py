"""The step plan: what goes in comes out, and no damaged buffer does worse than an EngineError."""

from __future__ import annotations

import random
import tracemalloc

import numpy as np
import pytest

from octavo.errors import EngineError
from octavo.runner.fake import FakeRunner
from octavo.scheduler import plan as format
from octavo.scheduler.plan import HEADER_WORDS, HOST_IDS, SAMPLE, PlanDraft, PlanView, float_bits, signed


def columns(rows: list[tuple[int, int, int, int]]) -> np.ndarray:
    return np.array(rows, np.int64).reshape(-1, 4).T


def example() -> tuple[PlanDraft, np.ndarray]:
    """Two decode rows, two chunks, and something in every section."""
    draft = PlanDraft(7)
    draft.write_table(np.array([1, 2]), np.array([3, 4]), np.array([11, 12], np.int32))
    draft.write_table(3, np.arange(2, dtype=np.int32), np.array([13, 14], np.int32))
    draft.copies += (5, 6)
    draft.swap_out += (7, 0, 8, 1)
    draft.swap_in += (2, 9)
    draft.params.append(np.arange(16, dtype=np.int32))
    draft.extras += (3, format.X_BAN_UNTIL, 3, 20, 2, 5)
    draft.extras += (4, format.X_ALLOWED, 1, 9)
    draft.tokens += [np.array([100, 101, 102], np.int32), np.array([103], np.int32)]
    rows = [(1, 48, 1, SAMPLE), (2, 64, 1, SAMPLE), (3, 0, 3, HOST_IDS | SAMPLE), (4, 5, 1, HOST_IDS)]
    return draft, draft.encode(columns(rows), 2)


def test_everything_that_is_written_is_read_back():
    _, words = example()
    view = PlanView(words)
    assert (view.step, view.rows, view.total_tokens, view.decode_rows, view.longest) == (7, 4, 6, 2, 3)
    assert view.device_rows.tolist() == [1, 2, 3, 4]
    assert view.start.tolist() == [48, 64, 0, 5]
    assert view.length.tolist() == [1, 1, 3, 1]
    assert view.flags.tolist() == [SAMPLE, SAMPLE, HOST_IDS | SAMPLE, HOST_IDS]
    assert view.table.tolist() == [[1, 3, 11], [2, 4, 12], [3, 0, 13], [3, 1, 14]]
    assert view.copies.tolist() == [[5, 6]]
    assert view.swap_out.tolist() == [[7, 0], [8, 1]]
    assert view.swap_in.tolist() == [[2, 9]]
    assert view.params.tolist() == [list(range(16))]
    items = [(row, kind, payload.tolist()) for row, kind, payload in view.extra_items()]
    assert items == [(3, format.X_BAN_UNTIL, [20, 2, 5]), (4, format.X_ALLOWED, [9])]
    assert view.tokens.tolist() == [100, 101, 102, 103]
    assert words.dtype == np.int32 and words.flags["C_CONTIGUOUS"]


def test_nothing_is_copied_on_reading():
    _, words = example()
    view = PlanView(words)
    for name in ("device_rows", "table", "params", "tokens"):
        assert np.shares_memory(getattr(view, name), words)


def test_a_plan_without_rows_and_a_plan_of_decodes_only():
    draft = PlanDraft(1)
    assert draft.empty()
    empty = PlanView(draft.encode(columns([]), 0))
    assert (empty.rows, empty.total_tokens, empty.longest) == (0, 0, 0)
    view = PlanView(PlanDraft(1 << 31).encode(columns([(1, 9, 1, SAMPLE)] * 3), 3))
    assert (view.step, view.rows, view.total_tokens, view.longest) == (0, 3, 3, 1)


def test_floats_and_unsigned_words_keep_their_bits():
    for value in (0.0, 1.0, 0.7, -1.5):
        assert np.array([float_bits(value)], np.int32).view(np.float32)[0] == np.float32(value)
    assert signed(0xFFFFFFFF) == -1 and signed(7) == 7 and signed(1 << 31) == -(1 << 31)


@pytest.mark.parametrize("cut", [0, 1, HEADER_WORDS - 1, HEADER_WORDS, -1])
def test_a_truncated_plan_is_refused(cut):
    _, words = example()
    with pytest.raises(EngineError, match="step plan"):
        PlanView(words[:cut])


def test_another_version_is_refused():
    _, words = example()
    words[1] += 1
    with pytest.raises(EngineError, match="same version"):
        PlanView(words)


def read_all(words: np.ndarray) -> None:
    """Touch everything that a runner touches."""
    view = PlanView(words)
    assert len(view.device_rows) == len(view.start) == len(view.length) == len(view.flags) == view.rows
    assert 0 <= view.decode_rows <= view.rows and view.total_tokens == int(view.length.astype(np.int64).sum())
    assert view.total_tokens == view.decode_rows + len(view.tokens)
    view.extra_items()


def fuzz(count: int, seed: int) -> tuple[int, int]:
    """Mutate an encoded plan; returns how many buffers were refused and how many were not."""
    rng = random.Random(seed)
    runner = FakeRunner(rows=8, max_len=128, block_size=16, blocks=32, vocab_size=200, host_blocks=4)
    _, clean = example()
    values = (-(1 << 31), -1, 0, 1, 2, 7, 255, 1 << 16, 1 << 30, (1 << 31) - 1)
    refused = 0
    for _ in range(count):
        words = clean.copy()
        for _ in range(rng.choice((1, 1, 1, 2, 5))):
            at = rng.randrange(HEADER_WORDS) if rng.random() < 0.6 else rng.randrange(len(words))
            words[at] = rng.choice(values) if rng.random() < 0.7 else int(words[at]) ^ (1 << rng.randrange(31))
        if rng.random() < 0.2:
            words = words[: rng.randrange(len(words) + 1)]
        try:
            read_all(words)
        except EngineError:
            refused += 1
        try:
            runner.launch(words)
        except EngineError:
            pass
    return refused, count - refused


def test_damaged_plans_are_refused_or_sane():
    """S11: never another exception, never much memory."""
    tracemalloc.start()
    try:
        refused, passed = fuzz(20_000, seed=1)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert refused > 10_000 and passed > 2000
    assert peak < 8 << 20


@pytest.mark.slow
def test_damaged_plans_at_length():
    refused, passed = fuzz(200_000, seed=2)
    assert refused + passed == 200_000
