"""What the runner, the decoder and the attention backends agree on: batch, KV pool, backend protocol.

The runner makes one `StepBatch` per step and one `KVPool` per engine. The decoder asks its backend for
`plan(batch)` once per step and calls `run(...)` once per layer; `run` first writes the keys and values of
ALL tokens of the step into the pool and then reads through the block tables, so rows of one step that
share a block see each other's writes in that layer.

Shape letters: T tokens of the step, R rows, M table columns, H query heads, K key/value heads, D head dim,
N blocks in the pool, S tokens in a block, L layers. Block 0 and row 0 are padding: a padding token has
slot 0..S-1 and its output is ignored; block 0 holds finite numbers only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

_COPIED_AT_ONCE = 32  # blocks that are twice in memory for a moment while they are copied


@dataclass(frozen=True)
class HostLengths:
    """Row lengths on the host (numpy int arrays of R), for backends with `needs_host_lengths`."""

    query_R: np.ndarray
    """tokens of this step per row, >= 1"""
    kv_R: np.ndarray
    """keys visible to the row's last token, this step's tokens included"""


@dataclass(frozen=True)
class StepBatch:
    """The device view of one step. Rows lie one after the other on the token axis, in row order.

    The last token of row r sits at position `kv_lens_R[r] - 1`; its tokens are consecutive positions.
    """

    ids_T: Tensor
    """token ids, int64"""
    positions_T: Tensor
    """position of each token in its sequence, int64"""
    slots_T: Tensor
    """where each token's key and value go: block * block_size + offset, int64"""
    starts_R1: Tensor
    """first token index of each row, then T; int32, R + 1 entries"""
    kv_lens_R: Tensor
    """int32; see `HostLengths.kv_R`"""
    tables_RM: Tensor
    """block numbers of each row, int32 or int64; entries past the row's length may be anything valid"""
    host: HostLengths | None = None
    """None only for backends that read the lengths from the device"""


class KVPool:
    """The paged key/value store of all layers, zero-initialised (unwritten slots must be finite).

    One allocation `data` of shape [L, 2, N, K, S, D]; `keys[layer]` and `values[layer]` are its views
    [N, K, S, D]. Head-major blocks: the S x D tile of one head is contiguous, so a gather of (block, head)
    rows is directly the operand of a batched matrix product, and a GPU kernel reads whole lines.

    With `scales_L2K` (float32, on the device; for keys and values of each layer and head) the pool is float8_e4m3fn,
    whatever `dtype`: it holds x / scale, clamped to +-448, and stands for that times the scale.
    """

    def __init__(
        self,
        layers: int,
        num_blocks: int,
        block_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        scales_L2K: Tensor | None = None,
    ) -> None:
        self.scales_L2K = scales_L2K
        dtype = dtype if scales_L2K is None else torch.float8_e4m3fn
        self.block_size = block_size
        self.num_blocks = num_blocks
        shape = (layers, 2, num_blocks, kv_heads, block_size, head_dim)
        if torch.device(device).type == "cpu":
            # numpy leaves untouched pages to the kernel, so a large pool costs memory only as it fills.
            nbytes = int(np.prod(shape)) * dtype.itemsize
            self.data = torch.from_numpy(np.zeros(nbytes, np.uint8)).view(dtype).view(shape)
        else:
            self.data = torch.zeros(shape, dtype=dtype, device=device)
        self.keys = [self.data[layer, 0] for layer in range(layers)]
        self.values = [self.data[layer, 1] for layer in range(layers)]

    @staticmethod
    def bytes_per_block(layers: int, block_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        """Bytes that one block takes over all layers, keys and values."""
        return 2 * layers * block_size * kv_heads * head_dim * dtype.itemsize

    def copy_blocks(self, sources_C: Tensor, destinations_C: Tensor) -> None:
        """Copy whole blocks (all layers) inside the pool. No destination may also be a source."""
        data = self.bits
        for at in range(0, len(sources_C), _COPIED_AT_ONCE):
            some = slice(at, at + _COPIED_AT_ONCE)
            data[:, :, destinations_C[some]] = data[:, :, sources_C[some]]

    @property
    def bits(self) -> Tensor:
        """`data` in a type that torch can index on every device: bytes for an FP8 pool."""
        return self.data if self.scales_L2K is None else self.data.view(torch.uint8)


@dataclass(frozen=True)
class AttentionShape:
    """The numbers of one model that a backend needs: heads, dims, softmax scale, soft-cap, window."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    softcap: float = 0.0
    """0 = none; else scores become softcap * tanh(scores / softcap)"""
    window: int = 0
    """0 = all earlier tokens; else each token sees itself and the window - 1 tokens before it"""


@dataclass(frozen=True)
class Capabilities:
    """What a backend can do; `choose` refuses a model that asks for more."""

    name: str
    device: str
    dtypes: tuple[torch.dtype, ...]
    softcap: bool
    window: bool
    needs_host_lengths: bool
    graph_safe: bool
    fp8_kv: bool = False
    """it also reads and writes pools with `KVPool.scales_L2K`"""


Plan = Any
"""whatever a backend's `plan` made; only that backend's `run` looks inside"""


class AttentionBackend(Protocol):
    """Paged causal attention. Constructed with an `AttentionShape` and the dtype of q, k, v and pool."""

    capabilities: Capabilities

    def plan(self, batch: StepBatch, block_size: int) -> Plan:
        """Everything that is equal for all layers of this step: indices, masks, groups."""
        ...

    def run(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, pool: KVPool, plan: Plan) -> Tensor:
        """Write k and v of all tokens to the pool, then attend. Returns o_THD in the dtype of q."""
        ...
