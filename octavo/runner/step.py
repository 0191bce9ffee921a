"""One step as plain functions over explicit state: inputs, forward, sampling. No plan is looked at twice.

Shape letters: R rows of the step, T its tokens, N rows that sample, V vocabulary, M table columns.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from octavo.attention.base import HostLengths, StepBatch
from octavo.runner.base import StepResult, TokenLogprobs
from octavo.runner.edits import prompt_chunks
from octavo.runner.rows import DeviceRows, Rows
from octavo.runner.sampler import all_logprobs, draw, token_logprobs
from octavo.scheduler.plan import RARE, SAMPLE, PlanView

HEAD_TOKENS = 64
"""prompt tokens whose logits are held at a time"""


def step_batch(view: PlanView, rows: DeviceRows, block_size: int) -> StepBatch:
    """The device view of a plan: ids (the device's own last tokens for decode rows), positions, slots, tables."""
    device, decode = rows.device, view.decode_rows
    length_R = view.length.astype(np.int64)
    end_R = view.start + view.length
    starts_R1 = np.zeros(view.rows + 1, np.int32)
    np.cumsum(length_R, out=starts_R1[1:])
    row_T = np.repeat(np.arange(view.rows), length_R)
    position_T = np.arange(view.total_tokens) - starts_R1[row_T] + view.start[row_T]
    device_rows_R = torch.from_numpy(view.device_rows.astype(np.int64)).to(device)
    ids_T = torch.cat(
        (rows.last_token_S[device_rows_R[:decode]], torch.from_numpy(view.tokens.astype(np.int64)).to(device))
    )
    positions_T = torch.from_numpy(position_T).to(device)
    columns = -(-int(end_R.max()) // block_size)
    tables_RM = rows.tables_SM[device_rows_R, :columns]
    blocks_T = tables_RM[torch.from_numpy(row_T).to(device), positions_T // block_size]
    return StepBatch(
        ids_T=ids_T,
        positions_T=positions_T,
        slots_T=blocks_T.to(torch.int64) * block_size + positions_T % block_size,
        starts_R1=torch.from_numpy(starts_R1).to(device),
        kv_lens_R=torch.from_numpy(end_R.astype(np.int32)).to(device),
        tables_RM=tables_RM,
        host=HostLengths(view.length, end_R),
    )


def sampled_rows(view: PlanView) -> np.ndarray:
    """Positions in the plan of the rows that sample, in row order."""
    return np.flatnonzero(view.flags & SAMPLE)


def sample(logits_NV: Tensor, view: PlanView, picked: np.ndarray, rows: Rows) -> tuple[Tensor, StepResult]:
    """Choose a token for each sampled row, keep it as the row's last token, and report.

    Returns the tokens on the device and a result whose `tokens` the caller fills in when they are on the host.
    """
    device_rows = view.device_rows[picked]
    position = view.start[picked] + view.length[picked]
    raw_NV = logits_NV
    rare = np.flatnonzero(view.flags[picked] & RARE).tolist()
    edited = [i for i in rare if int(device_rows[i]) in rows.host.edits]
    if edited:
        logits_NV = logits_NV.clone()
        for i in edited:
            rows.host.edits[int(device_rows[i])].apply(logits_NV[i], int(position[i]), rows.host.put_as_is)
    best_N, tokens_N = logits_NV.max(dim=-1)
    random = np.flatnonzero(rows.host.random[device_rows])
    if len(random):
        index = torch.from_numpy(random).to(rows.device)
        chosen = torch.from_numpy(device_rows[random].astype(np.int64)).to(rows.device)
        at = torch.from_numpy(position[random].astype(np.int64)).to(rows.device)
        filters = bool(rows.host.filters[device_rows[random]].any())
        tokens_N[index] = draw(logits_NV[index], rows.sampling(chosen, at), filters=filters)
    rows.last_token_S[torch.from_numpy(device_rows.astype(np.int64)).to(rows.device)] = tokens_N
    finite = torch.isfinite(best_N).cpu().numpy()
    result = StepResult(np.empty(0, np.int32), None if finite.all() else ~finite)
    for i in edited:
        rows.host.edits[int(device_rows[i])].took(int(tokens_N[i]))
    if rare:
        result.logprobs = _logprobs(raw_NV, rare, device_rows, tokens_N, rows)
    return tokens_N, result


def _logprobs(
    logits_NV: Tensor, rare: list[int], device_rows: np.ndarray, tokens_N: Tensor, rows: Rows
) -> dict[int, TokenLogprobs]:
    out = {}
    for i in rare:
        count = int(rows.host.logprobs[device_rows[i]])
        if count >= 0:
            out[i] = token_logprobs(logits_NV[i], int(tokens_N[i]), count)
    return out


def prompt_logprobs(
    view: PlanView, hidden_TI: Tensor, logits: Callable[[Tensor], Tensor]
) -> dict[int, tuple[int, list[TokenLogprobs]]] | None:
    """Log-probabilities of prompt tokens for the chunks that want them (see `StepResult.prompts`).

    The head runs over a few tokens at a time: their logits are never all there at once.
    """
    chunks = prompt_chunks(view)
    if not chunks:
        return None
    first_R = np.cumsum(view.length) - view.length
    found = {}
    for chunk in chunks:
        target_T = torch.from_numpy(chunk.targets).to(hidden_TI.device)
        entries: list[TokenLogprobs] = []
        for at in range(0, len(chunk.targets), HEAD_TOKENS):
            count = min(HEAD_TOKENS, len(chunk.targets) - at)
            first = int(first_R[chunk.row]) + at
            entries += all_logprobs(logits(hidden_TI[first : first + count]), target_T[at : at + count], chunk.best)
        found[chunk.row] = chunk.first, entries
    return found
