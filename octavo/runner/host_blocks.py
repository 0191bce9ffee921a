"""KV blocks in pinned host memory: where a CUDA runner puts what a plan swaps out.

All copies are on the runner's one stream, in the order of the plans, so nothing has to wait for anything. A block
is contiguous on the host; on the device it lies scattered over layers, so it passes through a gathered copy there.
Blocks move as bytes, whatever their type.

Shape letters: L layers, N blocks, C blocks that move, K key/value heads, S tokens in a block, D head dim.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_AT_A_TIME = 32  # blocks whose gathered copy exists at a time


class HostBlocks:
    """Room for `blocks` blocks of a pool `data_L2NKSD`."""

    def __init__(self, blocks: int, data_L2NKSD: Tensor) -> None:
        layers, two, _, *rest = data_L2NKSD.view(torch.uint8).shape
        pin = data_L2NKSD.device.type == "cuda" and blocks > 0
        self._blocks_NL2KSD = torch.zeros((blocks, layers, two, *rest), dtype=torch.uint8, pin_memory=pin)

    def take(self, data_L2NKSD: Tensor, sources_C: Tensor, places: NDArray[np.int32]) -> None:
        """Swap out: device blocks (numbers on the device) to host blocks."""
        data_L2NKSD = data_L2NKSD.view(torch.uint8)
        for at in range(0, len(places), _AT_A_TIME):
            gathered = data_L2NKSD.index_select(2, sources_C[at : at + _AT_A_TIME]).movedim(2, 0).contiguous()
            for i, place in enumerate(places[at : at + _AT_A_TIME].tolist()):
                self._blocks_NL2KSD[place].copy_(gathered[i], non_blocking=True)

    def give(self, data_L2NKSD: Tensor, places: NDArray[np.int32], destinations_C: Tensor) -> None:
        """Swap in: host blocks to device blocks (numbers on the device)."""
        data_L2NKSD = data_L2NKSD.view(torch.uint8)
        for at in range(0, len(places), _AT_A_TIME):
            some = places[at : at + _AT_A_TIME].tolist()
            shape = (len(some), *self._blocks_NL2KSD.shape[1:])
            gathered = torch.empty(shape, dtype=data_L2NKSD.dtype, device=data_L2NKSD.device)
            for i, place in enumerate(some):
                gathered[i].copy_(self._blocks_NL2KSD[place], non_blocking=True)
            data_L2NKSD.index_copy_(2, destinations_C[at : at + _AT_A_TIME], gathered.movedim(0, 2))
