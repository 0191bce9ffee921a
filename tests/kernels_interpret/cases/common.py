"""Steps for the kernel cases: a plan encoded by the scheduler's own code, its device rows, and a filled pool.

Every function takes the device, so that the checks on a real one build the same cases.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from octavo.kernels.gpu.step import RUN_WORDS, Cut, StepTables, begin
from octavo.scheduler.plan import HOST_IDS, P_LENGTH, PARAM_WORDS, SAMPLE, PlanDraft


@dataclass
class Case:
    """One step on the device, and the same facts on the host."""

    words: np.ndarray
    step: StepTables
    tables_SM: Tensor
    params_SP: Tensor
    last_token_S: Tensor
    rows: list[int]
    starts: list[int]
    lengths: list[int]
    ids: list[int]
    blocks: int


def error(got: Tensor, want: Tensor) -> float:
    """||got - want|| / ||want|| in float64; NaN never passes a comparison."""
    got, want = got.double().cpu(), want.double().cpu()
    return float((got - want).norm() / want.norm().clamp_min(1e-30))


def make_case(
    decodes: list[int],
    chunks: list[tuple[int, int]],
    cut: Cut,
    *,
    device: str = "cpu",
    block_size: int = 16,
    kv_heads: int = 64,
    shared: int = 0,
    lanes: int | None = None,
    tokens: int | None = None,
    sampled: list[int] | None = None,
    max_len: int | None = None,
    seed: int = 0,
) -> Case:
    """A step of decode rows with so many tokens before theirs, and of (first position, tokens) chunks.

    Block tables are random; the first `shared` tokens of the decode rows lie in common blocks.
    """
    rng = np.random.default_rng(seed)
    starts = [*decodes, *(start for start, _ in chunks)]
    lengths = [1] * len(decodes) + [length for _, length in chunks]
    count = len(starts)
    device_rows = rng.permutation(np.arange(1, count + 3))[:count].astype(np.int32)
    columns = -(-(max_len or max(s + n for s, n in zip(starts, lengths, strict=True))) // block_size)
    needs = [-(-(s + n) // block_size) for s, n in zip(starts, lengths, strict=True)]
    numbers = (rng.permutation(sum(needs) + 8) + 1).astype(np.int32)
    draft = PlanDraft(7)
    used = 0
    for i, row in enumerate(device_rows):
        mine = numbers[used : used + needs[i]].copy()
        used += needs[i]
        if i < len(decodes):
            mine[: shared // block_size] = numbers[: shared // block_size]
        draft.write_table(int(row), np.arange(needs[i], dtype=np.int32), mine)
        params = np.zeros(PARAM_WORDS, np.int32)
        params[0], params[P_LENGTH] = row, starts[i]
        draft.params.append(params)
    host_ids = rng.integers(0, 1000, sum(n for _, n in chunks)).astype(np.int32)
    if chunks:
        draft.tokens.append(host_ids)
    flags = np.array([SAMPLE] * len(decodes) + [HOST_IDS | SAMPLE] * len(chunks), np.int32)
    if sampled is not None:
        flags &= ~np.int32(SAMPLE)
        flags[sampled] |= SAMPLE
    columns_4R = tuple(np.array(column, np.int64) for column in (device_rows, starts, lengths, flags))
    words = draft.encode(columns_4R, len(decodes))
    lanes, tokens = lanes or count, tokens or sum(lengths)
    tiles = sum(-(-n // cut.tile) for _, n in chunks)
    most = max(lanes, count)
    step = StepTables(most, tokens, cut.workers + most, tiles, kv_heads, torch.device(device))
    tables_SM = torch.zeros((count + 3, columns), dtype=torch.int32, device=device)
    params_SP = torch.zeros((count + 3, PARAM_WORDS), dtype=torch.int32, device=device)
    last_token_S = torch.from_numpy(rng.integers(0, 1000, count + 3)).to(device)
    device_words = torch.from_numpy(np.concatenate([np.array([shared, 0, 0, 0], np.int32), words])).to(device)
    assert RUN_WORDS.value == 4
    begin(device_words, step, tables_SM, params_SP, last_token_S, cut, block_size, lanes, tokens)
    ids = last_token_S[device_rows[: len(decodes)].astype(np.int64)].tolist() + host_ids.tolist()
    return Case(
        words,
        step,
        tables_SM,
        params_SP,
        last_token_S,
        device_rows.tolist(),
        starts,
        lengths,
        ids,
        int(numbers.max()) + 1,
    )
