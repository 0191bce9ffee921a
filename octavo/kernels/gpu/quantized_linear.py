"""Launching the products with quantised weights: which tiles, and how many programs share one.

Shape letters: T tokens, I inputs, O outputs.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from octavo.kernels.gpu.launch import early
from octavo.kernels.gpu.quantized import Packed, products
from octavo.kernels.gpu.quantized_tuned import TUNED, Launch
from octavo.kernels.quant import IMPLIED_ZERO

_PART_FLOATS = 8 << 20
_COUNTERS = 4096


class Parts:
    """Parts and counters of the split products of one device; products run one after the other and share it."""

    def __init__(self, device: torch.device) -> None:
        self.counters = torch.zeros(_COUNTERS, dtype=torch.int32, device=device)
        self.floats = torch.empty(_PART_FLOATS, dtype=torch.float32, device=device)
        on_cuda = device.type == "cuda"
        self.processors = torch.cuda.get_device_properties(device).multi_processor_count if on_cuda else 4


def launch_for(packed: Packed, tokens: int) -> Launch:
    """The tuned launch for so many tokens."""
    table = TUNED[packed.kind]
    return table[next((size for size in table if tokens <= size), max(table))]


def split_for(launch: Launch, packed: Packed, tiles: int, floats: int, processors: int) -> tuple[int, int]:
    """Programs that share a tile of outputs, and blocks of each."""
    wanted = max(1, round(launch.waves * processors / tiles)) if launch.split == 0 else launch.split
    wanted = 1 << (min(wanted, 16).bit_length() - 1)  # few values, so few variants are compiled
    wanted = min(wanted, packed.blocks, max(1, _PART_FLOATS // (tiles * floats)))
    if tiles > _COUNTERS:
        wanted = 1
    per = -(-packed.blocks // wanted)
    return -(-packed.blocks // per), per


def quantized_linear(
    x_TI: Tensor,
    packed: Packed,
    bias_O: Tensor | None,
    residual_TO: Tensor | None,
    gated: bool,
    parts: Parts,
    launch: Launch | None = None,
) -> Tensor:
    """x W^T + b; added to `residual_TO` in place if there is one. x is bfloat16 or float16, contiguous.

    `gated`: the rows of the weight are G, then U, and the result is silu(x G^T) * (x U^T).
    """
    tokens, inputs = x_TI.shape
    outputs = packed.shape[0] // 2 if gated else packed.shape[0]
    launch = launch or launch_for(packed, tokens)
    width = min(max(8, triton.next_power_of_2(tokens)), launch.tokens)
    each = launch.outputs // 2 if gated else launch.outputs
    tiles_O, tiles_T = triton.cdiv(outputs, each), triton.cdiv(tokens, width)
    floats = launch.outputs * width
    split, per = split_for(launch, packed, tiles_O * tiles_T, floats, parts.processors)
    out_TO = residual_TO
    if out_TO is None:
        out_TO = torch.empty((tokens, outputs), dtype=x_TI.dtype, device=x_TI.device)
    asm = not triton.knobs.runtime.interpret and x_TI.dtype != torch.float32
    grid, pdl = (tiles_O, split, tiles_T), early(x_TI)
    products[grid](
        x_TI, packed.words, packed.scales, packed.words if packed.zeros is None else packed.zeros,
        x_TI if bias_O is None else bias_O, out_TO, parts.floats, parts.counters, tokens, outputs, inputs,
        packed.words.shape[-1], packed.blocks, per, packed.kind, float(IMPLIED_ZERO[packed.kind]), width,
        launch.outputs, packed.block, packed.groups, packed.rows, split, packed.zeros is not None,
        outputs % each == 0 and inputs % packed.block == 0, gated, residual_TO is not None,
        bias_O is not None, asm, launch.raw and packed.kind == "int4",
        "ieee" if x_TI.dtype == torch.float32 else "tf32", pdl,
        num_warps=launch.warps, num_stages=launch.stages, launch_pdl=pdl,
    )  # fmt: skip
    return out_TO
