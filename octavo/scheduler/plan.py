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

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from octavo.errors import EngineError

I32 = NDArray[np.int32]

MAGIC = 0x4F435456  # "OCTV"
VERSION = 1
HEADER_WORDS = 32
SECTIONS = ("rows", "table", "copies", "swap_out", "swap_in", "params", "extras", "tokens")
WIDTHS = (4, 3, 2, 2, 2, 16, 1, 1)

# Row flags.
SAMPLE = 1  # the row's gap closes in this step: sample one token
HOST_IDS = 2  # token ids come from TOKENS, not from the device's last token
RARE = 4  # the row needs the uncaptured sampler (logprobs, banned ids, penalties ...)

# Words of a parameter block.
PARAM_WORDS = 16
P_ROW, P_LENGTH, P_LAST, P_TOP_K, P_TEMPERATURE, P_TOP_P, P_MIN_P = range(7)
P_SEED_LOW, P_SEED_HIGH, P_CHILD, P_LOGPROBS, P_PROMPT, P_ADAPTER = range(7, 13)

# Kinds of EXTRAS.
X_BAN_UNTIL = 1  # payload: position before which the ids that follow may not be sampled, then the ids


def float_bits(value: float) -> int:
    """The bits of a float32 as a signed int32 word."""
    return int(np.float32(value).view(np.int32))


def signed(word: int) -> int:
    """A 32-bit unsigned word as the signed int32 that carries the same bits."""
    return word - (1 << 32) if word >= 1 << 31 else word


@dataclass(slots=True)
class PlanDraft:
    """The sections of a plan while the scheduler fills them. Lists are flat words."""

    step: int
    table: list[int] = field(default_factory=list)
    copies: list[int] = field(default_factory=list)
    swap_out: list[int] = field(default_factory=list)
    swap_in: list[int] = field(default_factory=list)
    params: list[int] = field(default_factory=list)
    extras: list[int] = field(default_factory=list)
    tokens: list[I32] = field(default_factory=list)

    def empty(self) -> bool:
        """True when nothing but rows could be in the plan."""
        return not (self.table or self.copies or self.swap_out or self.swap_in or self.params)

    def encode(self, device_rows: I32, start: I32, length: I32, flags: I32, decode_rows: int) -> I32:
        """The plan as one int32 buffer. The four arrays have one entry a row, decode rows first."""
        rows = len(device_rows)
        token_words = sum(map(len, self.tokens))
        flat = (self.table, self.copies, self.swap_out, self.swap_in, self.params, self.extras)
        sizes = [4 * rows, *map(len, flat), token_words]
        out = np.empty(HEADER_WORDS + sum(sizes), np.int32)
        header = [MAGIC, VERSION, self.step & 0x7FFFFFFF, rows, 0, decode_rows, 0, len(out)]
        offset = HEADER_WORDS
        for size, width in zip(sizes, WIDTHS, strict=True):
            header += (offset, size // width)
            offset += size
        header += [0] * (HEADER_WORDS - len(header))
        if rows:
            header[4] = int(length.sum())
            header[6] = int(length.max())
            columns = out[HEADER_WORDS : HEADER_WORDS + 4 * rows].reshape(4, rows)
            columns[0], columns[1], columns[2], columns[3] = device_rows, start, length, flags
        out[:HEADER_WORDS] = header
        offset = HEADER_WORDS + 4 * rows
        for words in flat:
            if words:
                out[offset : offset + len(words)] = words
                offset += len(words)
        for ids in self.tokens:
            out[offset : offset + len(ids)] = ids
            offset += len(ids)
        return out


class PlanView:
    """Read access to an encoded plan; every attribute is a view into the buffer, nothing is copied.

    `device_rows`, `start`, `length`, `flags`: one int32 a row. `table` [n, 3], `copies` [n, 2], `swap_out` [n, 2],
    `swap_in` [n, 2], `params` [n, PARAM_WORDS], `extras` and `tokens` flat. Raises `EngineError` for a buffer that
    is not a plan.
    """

    __slots__ = (
        "copies", "decode_rows", "device_rows", "extras", "flags", "length", "longest", "params", "rows", "start",
        "step", "swap_in", "swap_out", "table", "tokens", "total_tokens", "words",
    )  # fmt: skip

    def __init__(self, words: I32) -> None:
        header = words[:HEADER_WORDS].tolist()
        if len(header) < HEADER_WORDS or header[0] != MAGIC or header[1] != VERSION or header[7] > len(words):
            raise EngineError("A step plan has a wrong header.", "Do all ranks run the same version of Octavo?")
        self.words = words
        self.step, self.rows, self.total_tokens, self.decode_rows, self.longest = header[2:7]
        parts: list[I32] = []
        for s, width in enumerate(WIDTHS):
            offset, count = header[8 + 2 * s : 10 + 2 * s]
            part = words[offset : offset + count * width]
            parts.append(part.reshape(count, width) if width > 1 and s else part)
        columns = parts[0].reshape(4, self.rows)
        self.device_rows, self.start, self.length, self.flags = columns
        self.table, self.copies, self.swap_out, self.swap_in, self.params, self.extras, self.tokens = parts[1:]

    def extra_items(self) -> list[tuple[int, int, I32]]:
        """EXTRAS as (device row, kind, payload)."""
        items, at = [], 0
        while at < len(self.extras):
            row, kind, n = self.extras[at : at + 3].tolist()
            items.append((row, kind, self.extras[at + 3 : at + 3 + n]))
            at += 3 + n
        return items
