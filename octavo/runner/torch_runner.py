"""TorchRunner: plans executed with torch on one device.

Owns the decoder's tensors, the KV pool and the device rows. The order on the device is that of the plan format:
copies, parameter and table writes, forward, sampling. On CPU a launch computes at once and the ticket is the result.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.model.decoder import Decoder
from octavo.runner.base import StepResult
from octavo.runner.rows import DeviceRows
from octavo.runner.step import prompt_logprobs, sample, sampled_rows, step_batch
from octavo.scheduler.plan import PlanView


@dataclass(slots=True)
class Ticket:
    """A launched step: its tokens on the device, and the rest of its result."""

    tokens_N: Tensor | None
    result: StepResult


class TorchRunner:
    """Runs `decoder` on `blocks` KV blocks (the padding block included) of `block_size` tokens.

    `rows` is the largest number of sequences at a time, `max_len` the longest sequence in tokens. `swap_blocks`
    blocks of host memory take what plans swap out: `host`, [layer, K or V, block, kv head, slot, head dim].
    """

    def __init__(
        self, decoder: Decoder, *, blocks: int, block_size: int, rows: int, max_len: int, swap_blocks: int = 0
    ) -> None:
        self.decoder = decoder
        self.block_size, self.swap_blocks = block_size, swap_blocks
        self.pool = decoder.make_pool(blocks, block_size)
        shape = (*self.pool.data.shape[:2], swap_blocks, *self.pool.data.shape[3:])
        self.host = torch.zeros(shape, dtype=self.pool.bits.dtype, pin_memory=decoder.device.type == "cuda")
        self.rows = DeviceRows(rows + 1, -(-max_len // block_size), decoder.device)

    @torch.inference_mode()
    def launch(self, words: NDArray[np.int32]) -> Ticket:
        """Run one plan; see `octavo.runner.base.Runner`."""
        view = PlanView(words)
        self._move_blocks(view)
        self.rows.apply(view)
        if not view.rows:
            return Ticket(None, StepResult(np.empty(0, np.int32)))
        batch = step_batch(view, self.rows, self.block_size)
        hidden_TI = self.decoder.forward(batch, self.pool)
        prompts = prompt_logprobs(view, hidden_TI, self.decoder.logits) if len(view.extras) else None
        picked = sampled_rows(view)
        if not len(picked):
            return Ticket(None, StepResult(np.empty(0, np.int32), prompts=prompts))
        last_N = batch.starts_R1[1:][torch.from_numpy(picked).to(self.rows.device)].to(torch.int64) - 1
        logits_NV = self.decoder.logits(hidden_TI[last_N])
        tokens_N, result = sample(logits_NV, view, picked, self.rows)
        result.prompts = prompts
        if result.bad is not None:
            self._clean(view.device_rows[picked[result.bad]])
        return Ticket(tokens_N, result)

    def _clean(self, device_rows: NDArray[np.int32]) -> None:
        """Put zeros for what is not finite in the blocks of rows that failed.

        A masked key still counts as 0 times its value, so a NaN behind the end of the next owner would spread.
        """
        rows = torch.from_numpy(device_rows.astype(np.int64)).to(self.rows.device)
        blocks = self.rows.tables_SM[rows].unique().to(torch.int64)
        data = self.pool.data
        if self.pool.scales_L2K is None:
            data[:, :, blocks] = data[:, :, blocks].nan_to_num(0.0, 0.0, 0.0)
        else:
            bits = self.pool.bits
            bits[:, :, blocks] = bits[:, :, blocks].masked_fill_((bits[:, :, blocks] & 127) == 127, 0)

    def _move_blocks(self, view: PlanView) -> None:
        """Swap-out, copies, swap-in, in this order: a copy may overwrite what was just swapped out."""
        data = self.pool.bits
        if len(view.swap_out):
            pairs = torch.from_numpy(view.swap_out.astype(np.int64))
            self.host[:, :, pairs[:, 1]] = data[:, :, pairs[:, 0].to(data.device)].to(self.host.device)
        if len(view.copies):
            copies = torch.from_numpy(view.copies.astype(np.int64)).to(data.device)
            self.pool.copy_blocks(copies[:, 0], copies[:, 1])
        if len(view.swap_in):
            pairs = torch.from_numpy(view.swap_in.astype(np.int64))
            data[:, :, pairs[:, 1].to(data.device)] = self.host[:, :, pairs[:, 0]].to(data.device)

    def collect(self, ticket: Ticket) -> StepResult:
        """Wait for a launched step; see `octavo.runner.base.Runner`."""
        if ticket.tokens_N is not None:
            ticket.result.tokens = ticket.tokens_N.cpu().numpy().astype(np.int32)
        return ticket.result

    def close(self) -> None:
        """Drop the KV pool and its host blocks."""
        del self.pool, self.host
