"""The start of a step on the device: from the words of a plan to everything the other kernels read.

`begin` runs two kernels. The first applies the plan's table and parameter writes and, in one program, does the
arithmetic over rows: first tokens, lengths, how the keys of decode rows are shared out, how host-fed rows are cut
into tiles of queries. The second writes what depends on single tokens and items. Nothing visits the host, so a
captured graph holds for any plan that fits its sizes.

The keys of all decode rows, one row after the other, are shared out evenly over W workers, whole blocks of keys each.
What a worker has of one row is an item; a row that lies across a border has several. Or each row is cut into even
items by itself, about W in all, and each item is a worker's (`Cut.alone`).

Shape letters: R rows, T tokens, I decode items, W workers, Q query tiles, S device rows, M table columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

# Words of `StepTables.meta`.
M_ROWS = tl.constexpr(0)
M_TOKENS = tl.constexpr(1)
M_DECODE = tl.constexpr(2)  # rows of one token, which come first: who feeds itself, or all if no row has more
M_WORKERS = tl.constexpr(3)  # workers that have decode items
M_SHARE = tl.constexpr(4)  # blocks of keys of one worker
M_TILES = tl.constexpr(5)
M_SAMPLES = tl.constexpr(6)
M_PREFIX = tl.constexpr(7)  # leading keys that all decode rows share and another kernel reads
M_ITEMS = tl.constexpr(8)  # decode items
META_WORDS = 9

# Columns of `StepTables.rows_CR`.
C_ROW = tl.constexpr(0)  # device row
C_KEYS = tl.constexpr(1)  # keys that the row's last token sees
C_START = tl.constexpr(2)  # first token of the row on the token axis
C_BEGIN = tl.constexpr(3)  # first key of its decode items
C_ITEMS = tl.constexpr(4)  # number of its decode items
C_ITEM = tl.constexpr(5)  # first of them, and of its partial results
C_UNIT = tl.constexpr(6)  # blocks of keys of the rows before it
C_TILE = tl.constexpr(7)  # first of its tiles
C_SAMPLE = tl.constexpr(8)  # its place among the samples
C_TOKENS = tl.constexpr(9)  # its tokens in this step
ROW_COLUMNS = 10

# Words of a decode item, side by side so that one line of memory holds it.
I_LANE = tl.constexpr(0)  # place of the row in the step
I_ROW = tl.constexpr(1)  # device row
I_FROM = tl.constexpr(2)  # first key
I_TO = tl.constexpr(3)  # key after the last
I_LENGTH = tl.constexpr(4)  # keys of the row
I_PART = tl.constexpr(5)  # its number among the items of its row
I_PARTS = tl.constexpr(6)  # items of the row
I_PLACE = tl.constexpr(7)  # where the row's first partial result goes
ITEM_WORDS = tl.constexpr(8)

RUN_WORDS = tl.constexpr(4)  # words of the runner before the plan's: keys of the shared prefix, then free
_H_ROWS = tl.constexpr(8)  # where the header has the offset of the section; the count follows
_H_TABLE = tl.constexpr(10)
_H_PARAMS = tl.constexpr(18)
_H_TOKENS = tl.constexpr(22)
_PARAM_WORDS = tl.constexpr(16)
_WRITERS = 16
_BLOCK = 128


class StepTables:
    """Device memory that describes the step in progress; allocated once, filled by `begin`. All int32.

    items_I8: decode items, see `I_*`, by row, then key. first_W: first item of each worker, then the number of items.
    tiles_2Q: row and first token (in the row) of each query tile.
    samples_3R: token index, device row and position of each sample. finished_RK: decode items of a row that are done
    in the kernel that runs, per key/value head; zero between kernels.
    """

    def __init__(self, rows: int, tokens: int, items: int, tiles: int, kv_heads: int, device: torch.device) -> None:
        def ints(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self.meta = ints(META_WORDS)
        self.rows_CR = ints(ROW_COLUMNS, rows)
        self.finished_RK = ints(rows, kv_heads)
        self.items_I8 = ints(items, ITEM_WORDS.value)
        self.first_W = ints(items + 1)
        self.tiles_2Q = ints(2, max(tiles, 1))
        self.samples_3R = ints(3, rows)
        self.ids_T, self.positions_T, self.slots_T = ints(tokens), ints(tokens), ints(tokens)


@dataclass(frozen=True)
class Cut:
    """How attention work is cut: the keys of decode rows over up to `workers`, in blocks of `block`; tiles of `tile`
    query tokens. `alone`: rows are cut by themselves, into about `workers` items in all."""

    workers: int
    block: int
    tile: int
    alone: bool


@triton.jit
def _apply_writes(WORDS, TABLES, PARAMS, M, first, step, BLOCK: tl.constexpr):
    """Table writes and parameter blocks of the plan, shared out over the programs."""
    plan = WORDS + RUN_WORDS
    at = tl.load(plan + _H_TABLE)
    count = tl.load(plan + _H_TABLE + 1)
    for i in range(first * BLOCK, count, step * BLOCK):
        item = i + tl.arange(0, BLOCK)
        ok = item < count
        row = tl.load(plan + at + 3 * item, mask=ok, other=0).to(tl.int64)
        column = tl.load(plan + at + 3 * item + 1, mask=ok, other=0)
        tl.store(TABLES + row * M + column, tl.load(plan + at + 3 * item + 2, mask=ok, other=0), mask=ok)
    at = tl.load(plan + _H_PARAMS)
    words = tl.load(plan + _H_PARAMS + 1) * _PARAM_WORDS
    for i in range(first * BLOCK, words, step * BLOCK):
        word = i + tl.arange(0, BLOCK)
        ok = word < words
        row = tl.load(plan + at + word // _PARAM_WORDS * _PARAM_WORDS, mask=ok, other=0)
        value = tl.load(plan + at + word, mask=ok, other=0)
        tl.store(PARAMS + row * _PARAM_WORDS + word % _PARAM_WORDS, value, mask=ok)


@triton.jit
def _exclusive(count):
    return tl.cumsum(count, 0) - count


@triton.jit
def _arithmetic(
    WORDS, META, ROWS, R, workers, UNIT: tl.constexpr, TILE: tl.constexpr, RB: tl.constexpr, ALONE: tl.constexpr
):  # fmt: skip
    """Lengths, offsets and cuts of all rows, in one program."""
    plan = WORDS + RUN_WORDS
    rows = tl.load(plan + 3)
    decode_rows = tl.where(tl.load(plan + 6) > 1, tl.load(plan + 5), rows)
    prefix = tl.load(WORDS)
    at = plan + tl.load(plan + _H_ROWS)
    r = tl.arange(0, RB)
    ok = r < rows
    start = tl.load(at + rows + r, mask=ok, other=0)
    length = tl.load(at + 2 * rows + r, mask=ok, other=0)
    sampled = tl.load(at + 3 * rows + r, mask=ok, other=0) & 1
    last = start + length
    decodes = r < decode_rows
    units = tl.where(decodes, tl.cdiv(last - prefix, UNIT), 0)
    every = tl.sum(units, 0)
    share = tl.maximum(tl.cdiv(every, workers), 1)
    unit = _exclusive(units)
    if ALONE:
        items = tl.cdiv(units, share)
    else:
        items = tl.where(units > 0, (unit + units - 1) // share - unit // share + 1, 0)
    tiles = tl.where(ok & (r >= decode_rows), tl.cdiv(length, TILE), 0)
    inside = r < R
    tl.store(ROWS + C_ROW * R + r, tl.load(at + r, mask=ok, other=0), mask=inside)
    tl.store(ROWS + C_KEYS * R + r, last, mask=inside)
    tl.store(ROWS + C_START * R + r, _exclusive(length), mask=inside)
    tl.store(ROWS + C_BEGIN * R + r, r * 0 + prefix, mask=inside)
    tl.store(ROWS + C_ITEMS * R + r, items, mask=inside)
    tl.store(ROWS + C_ITEM * R + r, _exclusive(items), mask=inside)
    tl.store(ROWS + C_UNIT * R + r, unit, mask=inside)
    tl.store(ROWS + C_TILE * R + r, _exclusive(tiles), mask=inside)
    tl.store(ROWS + C_SAMPLE * R + r, _exclusive(sampled), mask=inside)
    tl.store(ROWS + C_TOKENS * R + r, length, mask=inside)
    tl.store(META + M_ROWS, rows)
    tl.store(META + M_TOKENS, tl.sum(length, 0))
    tl.store(META + M_DECODE, decode_rows)
    tl.store(META + M_WORKERS, tl.cdiv(every, share))
    tl.store(META + M_SHARE, share)
    tl.store(META + M_ITEMS, tl.sum(items, 0))
    tl.store(META + M_TILES, tl.sum(tiles, 0))
    tl.store(META + M_SAMPLES, tl.sum(sampled, 0))
    tl.store(META + M_PREFIX, prefix)


@triton.jit(do_not_specialize=["workers"])
def _begin(
    WORDS, META, ROWS, TABLES, PARAMS, R, M, workers, UNIT: tl.constexpr, TILE: tl.constexpr, RB: tl.constexpr,
    BLOCK: tl.constexpr, ALONE: tl.constexpr,
):  # fmt: skip
    if tl.program_id(0) == 0:
        _arithmetic(WORDS, META, ROWS, R, workers, UNIT, TILE, RB, ALONE)
    else:
        _apply_writes(WORDS, TABLES, PARAMS, M, tl.program_id(0) - 1, tl.num_programs(0) - 1, BLOCK)


@triton.jit
def _write_tokens(
    WORDS, ROWS, TABLES, LAST, IDS, POSITIONS, SLOTS, R, M, lane, decode_rows, S: tl.constexpr, BLOCK: tl.constexpr
):
    """Id, position and KV slot of each token of one row."""
    plan = WORDS + RUN_WORDS
    row = tl.load(ROWS + C_ROW * R + lane).to(tl.int64)
    start = tl.load(ROWS + C_START * R + lane)
    length = tl.load(ROWS + C_TOKENS * R + lane)
    first = tl.load(ROWS + C_KEYS * R + lane) - length
    tokens = plan + tl.load(plan + _H_TOKENS) - decode_rows
    for i in range(0, length, BLOCK):
        t = i + tl.arange(0, BLOCK)
        ok = t < length
        if lane < decode_rows:
            ids = tl.load(LAST + row + t * 0, mask=ok, other=0).to(tl.int32)
        else:
            ids = tl.load(tokens + start + t, mask=ok, other=0)
        position = first + t
        block = tl.load(TABLES + row * M + position // S, mask=ok, other=0)
        tl.store(IDS + start + t, ids, mask=ok)
        tl.store(POSITIONS + start + t, position, mask=ok)
        tl.store(SLOTS + start + t, block * S + position % S, mask=ok)


@triton.jit
def _write_items(
    META, ROWS, ITEMS, FIRST, R, items_cap, lane, UNIT: tl.constexpr, BLOCK: tl.constexpr, ALONE: tl.constexpr
):  # fmt: skip
    """Decode items of one row; an item where a worker's share begins is that worker's first."""
    share = tl.load(META + M_SHARE)
    begin = tl.load(ROWS + C_BEGIN * R + lane)
    last = tl.load(ROWS + C_KEYS * R + lane)
    count = tl.load(ROWS + C_ITEMS * R + lane)
    own = tl.load(ROWS + C_ITEM * R + lane)
    unit = tl.load(ROWS + C_UNIT * R + lane)
    row = tl.load(ROWS + C_ROW * R + lane)
    for i in range(0, count, BLOCK):
        c = i + tl.arange(0, BLOCK)
        ok = (c < count) & (own + c < items_cap)
        item = ITEMS + (own + c) * ITEM_WORDS
        worker = unit // share + c
        lo = tl.maximum(worker * share - unit, 0)
        hi = (worker + 1) * share - unit
        if ALONE:
            units = tl.cdiv(last - begin, UNIT)
            lo = units * c // count
            hi = units * (c + 1) // count
        tl.store(item + I_LANE, c * 0 + lane, mask=ok)
        tl.store(item + I_ROW, c * 0 + row, mask=ok)
        tl.store(item + I_FROM, begin + lo * UNIT, mask=ok)
        tl.store(item + I_TO, tl.minimum(begin + hi * UNIT, last), mask=ok)
        tl.store(item + I_LENGTH, c * 0 + last, mask=ok)
        tl.store(item + I_PART, c, mask=ok)
        tl.store(item + I_PARTS, c * 0 + count, mask=ok)
        tl.store(item + I_PLACE, c * 0 + own, mask=ok)
        if not ALONE:
            tl.store(FIRST + worker, own + c, mask=ok & (lo + unit == worker * share))
    if lane == tl.load(META + M_DECODE) - 1:
        tl.store(FIRST + tl.load(META + M_WORKERS), own + count)


@triton.jit
def _write_work(
    META, ROWS, ITEMS, FIRST, TILES, SAMPLES, WORDS, R, items_cap, tiles_cap, lane, TILE, UNIT: tl.constexpr,
    BLOCK: tl.constexpr, ALONE: tl.constexpr,
):  # fmt: skip
    """Decode items, query tiles and sample of one row."""
    _write_items(META, ROWS, ITEMS, FIRST, R, items_cap, lane, UNIT, BLOCK, ALONE)
    row = tl.load(ROWS + C_ROW * R + lane)
    last = tl.load(ROWS + C_KEYS * R + lane)
    length = tl.load(ROWS + C_TOKENS * R + lane)
    tiles = tl.where(lane < tl.load(META + M_DECODE), 0, tl.cdiv(length, TILE))
    for i in range(0, tiles, BLOCK):
        c = i + tl.arange(0, BLOCK)
        place = tl.load(ROWS + C_TILE * R + lane) + c
        ok = (c < tiles) & (place < tiles_cap)
        tl.store(TILES + place, c * 0 + lane, mask=ok)
        tl.store(TILES + tiles_cap + place, (tiles - 1 - c) * TILE, mask=ok)  # the tile with most keys first
    plan = WORDS + RUN_WORDS
    flags = plan + tl.load(plan + _H_ROWS) + 3 * tl.load(META + M_ROWS)
    if tl.load(flags + lane) & 1:
        place = SAMPLES + tl.load(ROWS + C_SAMPLE * R + lane)
        tl.store(place, tl.load(ROWS + C_START * R + lane) + length - 1)
        tl.store(place + R, row)
        tl.store(place + 2 * R, last)


@triton.jit(do_not_specialize=["lanes", "tokens"])
def _expand(
    WORDS, META, ROWS, ITEMS, FIRST, TILES, SAMPLES, IDS, POSITIONS, SLOTS, TABLES, LAST, R, M, lanes, tokens,
    items_cap, tiles_cap, TILE: tl.constexpr, UNIT: tl.constexpr, S: tl.constexpr, BLOCK: tl.constexpr,
    ALONE: tl.constexpr,
):  # fmt: skip
    lane = tl.program_id(0)
    rows = tl.load(META + M_ROWS)
    if lane < lanes:
        if lane < rows:
            decode_rows = tl.load(WORDS + RUN_WORDS + 5)
            _write_tokens(WORDS, ROWS, TABLES, LAST, IDS, POSITIONS, SLOTS, R, M, lane, decode_rows, S, BLOCK)
            _write_work(
                META, ROWS, ITEMS, FIRST, TILES, SAMPLES, WORDS, R, items_cap, tiles_cap, lane, TILE, UNIT, BLOCK,
                ALONE,
            )  # fmt: skip
        if lane >= tl.load(META + M_SAMPLES):  # samples that are not there read token 0
            tl.store(SAMPLES + lane, 0)
    else:  # padding tokens write to the padding block
        known = tl.load(META + M_TOKENS)
        for i in range(known + (lane - lanes) * BLOCK, tokens, (tl.num_programs(0) - lanes) * BLOCK):
            t = i + tl.arange(0, BLOCK)
            ok = t < tokens
            tl.store(IDS + t, t * 0, mask=ok)
            tl.store(POSITIONS + t, t * 0, mask=ok)
            tl.store(SLOTS + t, t * 0, mask=ok)


def begin(
    words: Tensor,
    step: StepTables,
    tables_SM: Tensor,
    params_SP: Tensor,
    last_token_S: Tensor,
    cut: Cut,
    block_size: int,
    lanes: int,
    tokens: int,
) -> None:
    """Apply the plan in `words` to the device rows and fill `step`.

    `lanes` >= rows of the plan and `tokens` >= its tokens are the sizes that the following kernels are launched
    for; `words` is RUN_WORDS words of the runner, then the plan's.
    """
    rows, columns = step.rows_CR.shape[1], tables_SM.shape[1]
    _begin[(1 + _WRITERS,)](
        words, step.meta, step.rows_CR, tables_SM, params_SP, rows, columns, cut.workers, cut.block, cut.tile,
        triton.next_power_of_2(rows), _BLOCK, cut.alone, num_warps=4,
    )  # fmt: skip
    _expand[(lanes + (_WRITERS if tokens > lanes else 1),)](
        words, step.meta, step.rows_CR, step.items_I8, step.first_W, step.tiles_2Q, step.samples_3R, step.ids_T,
        step.positions_T, step.slots_T, tables_SM, last_token_S, rows, columns, lanes, tokens,
        step.items_I8.shape[0], step.tiles_2Q.shape[1], cut.tile, cut.block, block_size, _BLOCK,
        cut.alone, num_warps=4,
    )  # fmt: skip
