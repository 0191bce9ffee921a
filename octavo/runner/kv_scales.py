"""Scales of a KV cache in FP8: measured on a text that the model reads once at start.

The largest key and value of each layer and head become a quarter of what the format can hold: e4m3 keeps its three
bits of precision over 15 powers of two, so headroom costs nothing, and what other texts exceed is not clamped.

Shape letters: L layers, K key/value heads, T tokens.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from octavo.attention.base import HostLengths, StepBatch
from octavo.model.decoder import Decoder

FP8_MAX = 448.0
HEADROOM = 4.0
_BLOCK = 16


@torch.inference_mode()
def calibrate(decoder: Decoder, ids: list[int]) -> Tensor:
    """scales_L2K (float32, on the device) from one pass over `ids` with a cache in the model's dtype.

    `decoder.kv_scales_L2K` must still be None.
    """
    batch, blocks = whole_sequence(ids, _BLOCK, decoder.device)
    pool = decoder.make_pool(blocks + 1, _BLOCK)
    decoder.forward(batch, pool)
    largest_L2K = pool.data.abs().amax(dim=(2, 4, 5)).to(torch.float32)
    return largest_L2K.clamp_min(1e-6) * (HEADROOM / FP8_MAX)


def whole_sequence(ids: list[int], block_size: int, device: torch.device) -> tuple[StepBatch, int]:
    """One row that reads all of `ids` in blocks 1, 2, ...; and how many."""
    count = len(ids)
    blocks = -(-count // block_size)
    positions_T = torch.arange(count, device=device)
    return (
        StepBatch(
            ids_T=torch.tensor(ids, device=device),
            positions_T=positions_T,
            slots_T=positions_T + block_size,
            starts_R1=torch.tensor([0, count], dtype=torch.int32, device=device),
            kv_lens_R=torch.tensor([count], dtype=torch.int32, device=device),
            tables_RM=torch.arange(1, blocks + 1, dtype=torch.int32, device=device)[None],
            host=HostLengths(np.array([count]), np.array([count])),
        ),
        blocks,
    )
