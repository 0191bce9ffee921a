"""The default backend on the CPU: torch, with as few and as large operations as a layer allows.

A step becomes a few *groups*. A group gathers the blocks of its rows into dense keys and values once and
then attends in one or more *tiles*. Rows with equal, short queries (decoding: 1) and similar lengths form
one group with one tile; a prefilling row is a group of its own whose queries are cut into tiles, so that an
early tile multiplies only with the keys it may see. With a sliding window only the blocks that some query of
a row can see are gathered: key positions below count from the first of them. The query heads that share a
key/value head are folded into the rows of one matrix product, so keys and values are read once per such head.

Figures that decided (CPU time of one Zen 4 core, one layer, bfloat16, 9/3 heads, D 64, cold cache): 64 rows of
400 keys: gather and two batched products 6.6 ms, gather and `scaled_dot_product_attention` 8.3; one prompt of
512 tokens: tiles 4.6 ms, `scaled_dot_product_attention` 9.0; 1,024 tokens: 14 and 25. The price: scores are
rounded to the model dtype before the softmax, as in eager transformers (mean KL to float32 on SmolLM2 0.00135,
with float32 scores 0.00125); the softmax itself runs in float32 or wider.

Shape letters: T tokens, R rows, M table columns, H query heads, K key/value heads, G = H / K, D head dim,
N blocks in the pool, S tokens in a block, Q queries of a row in a tile, U keys of a tile, W masked keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from octavo.attention.base import AttentionShape, Capabilities, HostLengths, KVPool, StepBatch
from octavo.errors import EngineError
from octavo.kernels.reference import to_fp8

_TILE_QUERIES = 128
"""queries of a prefilling row per tile; rows with fewer than a quarter of it share groups"""
_GROUP_BYTES = 8 << 20
"""gathered keys and values of one group: they must still be in the cache when they are multiplied"""
_WASTE_BYTES = 512 << 10
"""a group ends where padding its next row to the longest one would cost more than one group more"""


@dataclass(frozen=True)
class _Tile:
    """Queries [start, stop) of the group's tokens, which see the first `keys` keys."""

    start: int
    stop: int
    keys: int
    mask_R1QW: Tensor | None
    """0 or -inf, added to the scores of the last W keys"""
    first: int = 0
    """keys before this one are seen by no query of the tile"""


@dataclass(frozen=True)
class _Group:
    """`rows` rows of equal query count; `index` picks (block, head) tiles out of the pool, row by row."""

    rows: int
    index: Tensor
    tiles: tuple[_Tile, ...]


@dataclass(frozen=True)
class _Plan:
    write_TK: Tensor
    """where each token's head vector goes in the pool seen as [N * K * S, D]"""
    order_T: Tensor | None
    """token order of the groups (None: the order of the batch), and back"""
    inverse_T: Tensor | None
    groups: tuple[_Group, ...]


class TorchCpuAttention:
    """See `octavo.attention.base.AttentionBackend`."""

    capabilities = Capabilities(
        "torch_cpu",
        "cpu",
        (torch.bfloat16, torch.float32, torch.float64, torch.float16),
        softcap=True,
        window=True,
        needs_host_lengths=True,
        graph_safe=False,
        fp8_kv=True,
    )

    def __init__(self, shape: AttentionShape, dtype: torch.dtype) -> None:
        self._shape = shape
        self._dtype = dtype
        self._zero = torch.zeros(1, 1, 1, dtype=dtype)
        self._token_bytes = 2 * shape.kv_heads * shape.head_dim * dtype.itemsize
        # Fresh memory for each gather would cost more in page faults than the gather: 380 ms a step of 64 rows
        # against 240 (CPU time, SmolLM2-135M).
        self._buffers = [torch.empty(0, dtype=dtype), torch.empty(0, dtype=dtype)]
        self._heads_K = torch.arange(shape.kv_heads)

    def plan(self, batch: StepBatch, block_size: int) -> _Plan:
        """Group the rows by query count and length; build indices and masks."""
        if batch.host is None:
            raise EngineError("This attention backend needs the row lengths on the host, and got none.")
        skipped_R, host = self._seen(batch.host, block_size)
        order_R, sizes = self._cut(host, block_size)
        tables_RM = batch.tables_RM.index_select(0, torch.from_numpy(order_R)).long()
        if skipped_R.any():
            column_RM = torch.from_numpy(skipped_R[order_R])[:, None] + torch.arange(tables_RM.shape[1])
            tables_RM = tables_RM.gather(1, column_RM.clamp_(max=tables_RM.shape[1] - 1))
        blocks_R = torch.from_numpy(-(-host.kv_R[order_R] // block_size))
        used_RM = torch.arange(tables_RM.shape[1]) < blocks_R[:, None]
        index_RKM = (tables_RM * used_RM)[:, None] * self._shape.kv_heads + self._heads_K[:, None]
        groups, row, token = [], 0, 0
        for size in sizes:
            rows = order_R[row : row + size]
            queries, kv_r = int(host.query_R[rows[0]]), host.kv_R[rows]
            columns = -(-int(kv_r.max()) // block_size)
            index = index_RKM[row : row + size, :, :columns].reshape(-1)
            groups.append(_Group(size, index, self._tiles(token, queries, kv_r, columns * block_size)))
            row, token = row + size, token + size * queries
        order_T, inverse_T = _token_order(order_R, host.query_R)
        block_T, offset_T = batch.slots_T // block_size, batch.slots_T % block_size
        write_TK = (block_T[:, None] * self._shape.kv_heads + self._heads_K) * block_size + offset_T[:, None]
        return _Plan(write_TK.reshape(-1), order_T, inverse_T, tuple(groups))

    def run(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, pool: KVPool, plan: _Plan) -> Tensor:
        """Write k and v, attend; o_THD."""
        parts = pool.keys[layer], pool.values[layer]
        scales_2K = None if pool.scales_L2K is None else pool.scales_L2K[layer]
        for part_NKSD, values_TKD, i in zip(parts, (k_TKD, v_TKD), (0, 1), strict=True):
            if scales_2K is not None:
                values_TKD = to_fp8(values_TKD, scales_2K[i]).view(torch.uint8)
                part_NKSD = part_NKSD.view(torch.uint8)
            head_dim = part_NKSD.shape[3]
            part_NKSD.view(-1, head_dim).index_copy_(0, plan.write_TK, values_TKD.reshape(-1, head_dim))
        if plan.order_T is not None:
            q_THD = q_THD.index_select(0, plan.order_T)
        outputs = []
        for group in plan.groups:
            k, v = (
                self._gather(i, part, group, None if scales_2K is None else scales_2K[i])
                for i, part in enumerate(parts)
            )
            outputs += [self._attend(q_THD, k, v, group.rows, tile) for tile in group.tiles]
        o_THD = torch.cat(outputs) if len(outputs) > 1 else outputs[0]
        return o_THD if plan.inverse_T is None else o_THD.index_select(0, plan.inverse_T)

    def _gather(self, part: int, pool_NKSD: Tensor, group: _Group, scale_K: Tensor | None) -> Tensor:
        """The (block, head) tiles of a group as dense [rows * K, M * S, D], valid until the next call."""
        tile = pool_NKSD.shape[2] * pool_NKSD.shape[3]
        if scale_K is not None:
            bits = pool_NKSD.view(torch.uint8).view(-1, tile).index_select(0, group.index)
            heads = bits.view(torch.float8_e4m3fn).view(group.rows, len(scale_K), -1).to(torch.float32)
            wide = (heads * scale_K[:, None]).to(self._dtype)
            return wide.view(group.rows * len(scale_K), -1, pool_NKSD.shape[3])
        size = len(group.index) * tile
        if self._buffers[part].numel() < size:
            self._buffers[part] = torch.empty(size, dtype=self._dtype)
        dense = self._buffers[part][:size].view(-1, tile)
        torch.index_select(pool_NKSD.view(-1, tile), 0, group.index, out=dense)
        return dense.view(group.rows * pool_NKSD.shape[1], -1, pool_NKSD.shape[3])

    def _attend(self, q_THD: Tensor, k: Tensor, v: Tensor, rows: int, tile: _Tile) -> Tensor:
        """One tile: q, folded to [rows * K, G * Q, D], times dense k and v [rows * K, U, D]."""
        kv_heads, head_dim = self._shape.kv_heads, self._shape.head_dim
        group = self._shape.heads // kv_heads
        q = q_THD[tile.start : tile.stop].view(rows, -1, kv_heads, group, head_dim)
        queries = q.shape[1]
        q = q.permute(0, 2, 3, 1, 4).reshape(rows * kv_heads, group * queries, head_dim)
        k, v = k[:, tile.first : tile.keys], v[:, tile.first : tile.keys]
        softcap = self._shape.softcap
        scores = torch.baddbmm(self._zero, q, k.transpose(1, 2), beta=0, alpha=self._shape.scale / (softcap or 1.0))
        if softcap:
            scores = scores.tanh_().mul_(softcap)
        if tile.mask_R1QW is not None:
            keys, masked = tile.keys - tile.first, tile.mask_R1QW.shape[-1]
            by_query = scores.view(rows, kv_heads * group, queries, keys)
            by_query[..., keys - masked :].add_(tile.mask_R1QW)
        o = torch.bmm(torch.softmax(scores, dim=-1), v).view(rows, kv_heads, group, queries, head_dim)
        return o.permute(0, 3, 1, 2, 4).reshape(rows * queries, kv_heads * group, head_dim)

    def _seen(self, host: HostLengths, block_size: int) -> tuple[np.ndarray, HostLengths]:
        """Blocks at the start of each row that no query of the step can see, and the lengths without them."""
        first_R = host.kv_R - host.query_R + 1 - self._shape.window  # of the row's first query
        skipped_R = np.maximum(first_R, 0) // block_size if self._shape.window else np.zeros_like(host.kv_R)
        return skipped_R, HostLengths(host.query_R, host.kv_R - skipped_R * block_size)

    def _cut(self, host: HostLengths, block_size: int) -> tuple[np.ndarray, list[int]]:
        """Row order (by query count, then longest first) and how many consecutive rows each group takes."""
        order_R = np.lexsort((-host.kv_R, host.query_R))
        sizes: list[int] = []
        queries, longest, waste = -1, 0, 0
        for row in order_R:
            length = -(-int(host.kv_R[row]) // block_size) * block_size
            waste += (longest - length) * self._token_bytes
            full = bool(sizes) and (sizes[-1] + 1) * longest * self._token_bytes > _GROUP_BYTES
            apart = queries != host.query_R[row] or queries > _TILE_QUERIES // 4
            if apart or full or waste > _WASTE_BYTES:
                sizes.append(0)
                queries, longest, waste = int(host.query_R[row]), length, 0
            sizes[-1] += 1
        return order_R, sizes

    def _tiles(self, token: int, queries: int, kv_r: np.ndarray, gathered: int) -> tuple[_Tile, ...]:
        """One tile for a group of several rows; for one row, tiles of at most `_TILE_QUERIES` queries.

        The last tile takes all gathered keys, padding included: masking that is cheaper than the copy that a
        batched product makes of a slice.
        """
        count = 1 if len(kv_r) > 1 else -(-queries // _TILE_QUERIES)
        tiles, stop = [], 0
        for part in range(1, count + 1):
            start, stop = stop, queries * part // count
            visible_r = kv_r - queries + stop
            keys = gathered if part == count else int(visible_r[0])
            tokens = (token + start * len(kv_r), token + stop * len(kv_r))
            window = self._shape.window if count > 1 else 0
            first = max(int(visible_r[0]) - (stop - start) + 1 - window, 0) if window else 0
            tiles.append(_Tile(*tokens, keys, self._mask(visible_r, stop - start, first, keys), first))
        return tuple(tiles)

    def _mask(self, kv_r: np.ndarray, queries: int, first: int, keys: int) -> Tensor | None:
        """Query i of `queries` sees keys up to kv - queries + i, and with a window no more than that many.

        Only the columns from the first of `first` .. `keys` - 1 that some query must not see.
        """
        window = self._shape.window
        if not window or int(kv_r.max()) - window <= first:
            first = int(kv_r.min()) - queries + 1
        if first >= keys:
            return None
        last_RQ = torch.from_numpy(kv_r - queries)[:, None] + torch.arange(queries)
        key_W = torch.arange(first, keys)
        hidden_RQW = key_W > last_RQ[..., None]
        if window:
            hidden_RQW |= key_W <= last_RQ[..., None] - window
        mask_RQW = torch.zeros(hidden_RQW.shape, dtype=self._dtype).masked_fill_(hidden_RQW, float("-inf"))
        return mask_RQW[:, None]


def _token_order(order_R: np.ndarray, query_R: np.ndarray) -> tuple[Tensor | None, Tensor | None]:
    """Token permutation that puts rows into `order_R`, and its inverse; None when nothing moves."""
    if (order_R[1:] > order_R[:-1]).all():
        return None, None
    starts_R = np.concatenate(([0], np.cumsum(query_R)[:-1]))
    counts_r = query_R[order_R]
    ends_r = np.cumsum(counts_r)
    order_T = np.repeat(starts_R[order_R] - (ends_r - counts_r), counts_r) + np.arange(ends_r[-1])
    inverse_T = np.empty_like(order_T)
    inverse_T[order_T] = np.arange(len(order_T))
    return torch.from_numpy(order_T), torch.from_numpy(inverse_T)
