"""StepPlan: everything one step of the model needs, as one int32 buffer.

The buffer is at once the message to follower ranks, the host-to-device payload, the log line and the test
fixture. The scheduler writes it (`PlanDraft.encode`), everybody else only reads it (`PlanView`).

Layout (int32 words): a header of `HEADER_WORDS`, then the sections in any order; the header holds offset and
count of each. Counts are in items, an item has the width given here.

    header   0 magic  1 version  2 step  3 rows  4 tokens  5 decode rows  6 longest chunk  7 words in all
             8 + 2s offset and 9 + 2s count of section s, in the order of `SECTIONS`
    ROWS     4 columns of `rows` words: device row, first position, number of tokens, flags
    TABLE    [device row, column, block]: block-table writes; no (row, column) occurs twice in one plan
    COPIES   [source block, destination block]
    SWAP_OUT [device block, host block]       SWAP_IN [host block, device block]
    PARAMS   `PARAM_WORDS` words for each row that is set up (again); see `P_*`
    EXTRAS   [device row, kind, n, n payload words]...: rare features; the count is in words
    TOKENS   token ids of all rows flagged HOST_IDS, in row order

Order of rows: first the decode rows (one token each, taken from the device's own last token), then chunks with
their ids in TOKENS. A row flagged SAMPLE yields one token; its position is first position + number of tokens.
Order on the device: swap-out, copies, swap-in, parameter and table writes, forward, sampling.
Device row 0 and block 0 are padding and never named by a plan.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from octavo.errors import EngineError

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]

MAGIC = 0x4F435456  # "OCTV"
VERSION = 1
HEADER_WORDS = 32
SECTIONS = ("rows", "table", "copies", "swap_out", "swap_in", "params", "extras", "tokens")
WIDTHS = (4, 3, 2, 2, 2, 16, 1, 1)
_NOTHING = [np.empty((0, width) if width > 1 and s else 0, np.int32) for s, width in enumerate(WIDTHS)]
_HEADER = struct.Struct(f"<{8 + 2 * len(SECTIONS)}i{4 * (HEADER_WORDS - 8 - 2 * len(SECTIONS))}x")

# Row flags.
SAMPLE = 1  # the row's gap closes in this step: sample one token
HOST_IDS = 2  # token ids come from TOKENS, not from the device's last token
RARE = 4  # the row needs the uncaptured sampler (logprobs, banned ids, penalties ...)

# Words of a parameter block.
PARAM_WORDS = 16
P_ROW, P_LENGTH, P_LAST, P_TOP_K, P_TEMPERATURE, P_TOP_P, P_MIN_P = range(7)
P_SEED_LOW, P_SEED_HIGH, P_CHILD, P_LOGPROBS, P_PROMPT, P_ADAPTER = range(7, 13)

# Kinds of EXTRAS.
# What a row wants of its logits comes with its parameter block and holds until the row is set up again.
X_BAN_UNTIL = 1  # payload: position before which the ids that follow may not be sampled, then the ids
X_BIAS = 2  # ids, then as many float32 values to add to their logits
X_ALLOWED = 3  # the only ids that may be sampled
X_BAD_WORDS = 4  # number of known last ids, these, then (number of ids, ids) of each sequence that may not come up
X_PENALTIES = 5  # float32 repetition, presence, frequency; number of different prompt ids, these; the output ids
# For a chunk of prompt in the same plan: number of best ids to report, tokens of the chunk to report on (each on the
# token after it), id of the token after the chunk or -1.
X_PROMPT_LOGPROBS = 6


def table_capacity(rows: int, columns: int) -> int:
    """Most block-table writes of one plan: one for each row, the longest table, and many of shared prompts."""
    return rows + columns + 16384


def swap_capacity(columns: int) -> int:
    """Most blocks that one plan swaps out, and most that it swaps in: the longest table, and some."""
    return columns + 1024


def float_bits(value: float) -> int:
    """The bits of a float32 as a signed int32 word."""
    return int(np.float32(value).view(np.int32))


def signed(word: int) -> int:
    """A 32-bit unsigned word as the signed int32 that carries the same bits."""
    return word - (1 << 32) if word >= 1 << 31 else word


@dataclass(slots=True)
class PlanDraft:
    """The sections of a plan while the scheduler fills them: arrays where there may be much, else flat words."""

    step: int
    table: list[I32] = field(default_factory=list)
    copies: list[int] = field(default_factory=list)
    swap_out: list[int] = field(default_factory=list)
    swap_in: list[int] = field(default_factory=list)
    params: list[I32] = field(default_factory=list)
    extras: list[int] = field(default_factory=list)
    tokens: list[I32] = field(default_factory=list)
    table_writes: int = 0

    def write_table(self, device_rows: I64 | int, columns: I64 | int, blocks: I64) -> None:
        """Add block-table writes; scalars hold for all `blocks`."""
        items = np.empty((len(blocks), 3), np.int32)
        items[:, 0], items[:, 1], items[:, 2] = device_rows, columns, blocks
        self.table.append(items.reshape(-1))
        self.table_writes += len(blocks)

    def empty(self) -> bool:
        """True when nothing but rows could be in the plan."""
        return not (self.table or self.copies or self.swap_out or self.swap_in or self.params)

    def encode(self, columns: Sequence[I64] | I64, decode_rows: int) -> I32:
        """The plan as one int32 buffer. `columns` are the four of ROWS, decode rows first."""
        rows = len(columns[0])
        token_words = sum(map(len, self.tokens))
        longest = max(columns[2][decode_rows:].tolist(), default=min(rows, 1))
        counts = (
            rows, self.table_writes, len(self.copies) // 2, len(self.swap_out) // 2, len(self.swap_in) // 2,
            len(self.params), len(self.extras), token_words,
        )  # fmt: skip
        at = HEADER_WORDS
        places: list[int] = []
        for count, width in zip(counts, WIDTHS, strict=True):
            places += (at, count)
            at += count * width
        out = np.empty(at, np.int32)
        tokens = decode_rows + token_words
        step = self.step & 0x7FFFFFFF
        _HEADER.pack_into(out.data, 0, MAGIC, VERSION, step, rows, tokens, decode_rows, longest, at, *places)
        end = HEADER_WORDS + 4 * rows
        out[HEADER_WORDS:end].reshape(4, rows)[:] = columns
        parts: list[I32] = list(self.table)
        for words in (self.copies, self.swap_out, self.swap_in):
            if words:
                parts.append(np.array(words, np.int32))
        parts += self.params
        if self.extras:
            parts.append(np.array(self.extras, np.int32))
        parts += self.tokens
        if parts:
            np.concatenate(parts, out=out[end:])
        return out


class PlanView:
    """Read access to an encoded plan; every attribute is a view into the buffer, nothing is copied.

    `device_rows`, `start`, `length`, `flags`: one int32 a row. `table` [n, 3], `copies` [n, 2], `swap_out` [n, 2],
    `swap_in` [n, 2], `params` [n, PARAM_WORDS], `extras` and `tokens` flat. Raises `EngineError` for a buffer that
    is not a plan: wrong header, a section out of bounds, rows that do not add up.
    """

    __slots__ = (
        "copies", "decode_rows", "device_rows", "extras", "flags", "length", "longest", "params", "rows", "start",
        "step", "swap_in", "swap_out", "table", "tokens", "total_tokens", "words",
    )  # fmt: skip

    def __init__(self, words: I32) -> None:
        header = words[:HEADER_WORDS].tolist()
        if len(header) < HEADER_WORDS or header[:2] != [MAGIC, VERSION] or header[7] != len(words):
            raise _damaged("a wrong header")
        self.words = words
        self.step, self.rows, self.total_tokens, self.decode_rows, self.longest = header[2:7]
        parts: list[I32] = []
        for nothing, width, offset, count in zip(_NOTHING, WIDTHS, header[8::2], header[9::2], strict=False):
            end = offset + count * width
            if count < 0 or offset < HEADER_WORDS or end > len(words):
                name = SECTIONS[len(parts)]
                raise _damaged(f"section {name} of {count} items at word {offset} of {len(words)}")
            part = words[offset:end] if count else nothing
            parts.append(part.reshape(count, width) if count and nothing.ndim == 2 else part)
        if len(parts[0]) != 4 * self.rows or not 0 <= self.decode_rows <= self.rows:
            raise _damaged(f"{self.rows} rows of which {self.decode_rows} decode")
        columns = parts[0].reshape(4, self.rows)
        self.device_rows, self.start, self.length, self.flags = columns
        self.table, self.copies, self.swap_out, self.swap_in, self.params, self.extras, self.tokens = parts[1:]
        self._check_lengths()

    def _check_lengths(self) -> None:
        """One token for each decode row, the others' ids in TOKENS: whoever walks the rows stays inside."""
        if not self.rows:
            fits = self.total_tokens == len(self.tokens) == 0
        else:
            longest, decodes = int(self.length.max()), self.decode_rows
            # Python integers: a damaged plan may hold lengths that overflow in sum.
            fed = sum(self.length[decodes:].tolist()) if decodes < self.rows else 0
            fits = (
                int(self.length.min()) >= 1
                and int(self.start.min()) >= 0
                and (longest == 1 or int(self.length[:decodes].max(initial=1)) == 1)
                and fed == len(self.tokens)
                and self.total_tokens == decodes + fed
                and self.longest == longest
            )
        if not fits:
            raise _damaged("lengths that do not add up")

    def extra_items(self) -> list[tuple[int, int, I32]]:
        """EXTRAS as (device row, kind, payload)."""
        items, at = [], 0
        while at < len(self.extras):
            head = self.extras[at : at + 3].tolist()
            if len(head) < 3 or not 0 <= head[2] <= len(self.extras) - at - 3:
                raise _damaged("extras that run over their end")
            row, kind, n = head
            items.append((row, kind, self.extras[at + 3 : at + 3 + n]))
            at += 3 + n
        return items


def _damaged(what: str) -> EngineError:
    return EngineError(f"A step plan has {what}.", "Do all ranks run the same version of Octavo?")
