"""SlotTable: the state of every live sequence, one host row each, as numpy columns.

A row is given out at submit and given back when the sequence has ended and nothing of it is in flight. The columns
hold what the fast path of `plan` and `commit` needs; everything rare hangs on the row's `Sequence`. Row 0 is unused,
so that 0 can mean "none". The table doubles when it is full.

`history` is indexed by *device* row: the known token ids of running sequences.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from octavo.types import EngineRequest

I32 = NDArray[np.int32]

# States of a row.
EMPTY = 0
WAITING = 1  # in the queue: no device row; holds blocks only when forked
PREFILL = 2  # has a device row and a gap between known and computed tokens that the host must feed
DECODE = 3  # has a device row; its one uncomputed token is the device's last token
ENDING = 4  # every token it may have is computed or in flight; waits for the commit
PREEMPTED = 5  # blocks are gone; goes back to the queue when nothing of it is in flight
DEAD = 6  # ended; goes back to the table when nothing of it is in flight

# Row flags: anything that makes the fast path look closer.
HAS_STOP_IDS = 1  # more stop ids than the one in column `eos`
SHARED_TAIL = 2  # the next block written may be shared: copy on write
IS_RARE = 4  # the step needs the uncaptured sampler

COLUMNS: tuple[tuple[str, type], ...] = (
    ("state", np.int8),
    ("known", np.int32),  # tokens that exist, sampled ones in flight included
    ("computed", np.int32),  # tokens whose K and V are written once every plan made so far has run
    ("limit", np.int32),  # the sequence ends when it has this many tokens
    ("eos", np.int32),  # token id that ends it, -1 for none
    ("flags", np.uint8),
    ("in_flight", np.int16),  # planned steps that are not committed
    ("device_row", np.int32),
    ("arrival", np.int64),  # order of admission to the queue, kept through preemption
    ("last_step", np.int64),
    ("request_id", np.int64),
    ("child", np.int32),
)


@dataclass(slots=True, eq=False)
class Sequence:
    """What a row has beside its columns. `ids` are the known tokens while it has no device row."""

    request: EngineRequest
    row: int
    ids: I32
    keys: list[bytes]  # keys of the leading full blocks of the known tokens
    stop_ids: frozenset[int] = frozenset()
    blocks: list[int] = field(default_factory=list)
    dormant: list[Sequence] = field(default_factory=list)  # children that wait for the prompt to be computed
    preemptions: int = 0
    cached: int = 0  # prompt tokens found in the prefix cache at first admission
    admitted: bool = False


class SlotTable:
    """Columns of `COLUMNS` as attributes, `sequences[row]`, and the free rows."""

    state: NDArray[np.int8]
    known: I32
    computed: I32
    limit: I32
    eos: I32
    flags: NDArray[np.uint8]
    in_flight: NDArray[np.int16]
    device_row: I32
    arrival: NDArray[np.int64]
    last_step: NDArray[np.int64]
    request_id: NDArray[np.int64]
    child: I32

    def __init__(self, rows: int) -> None:
        self.rows = rows
        for name, dtype in COLUMNS:
            setattr(self, name, np.zeros(rows, dtype))
        self.sequences: list[Sequence | None] = [None] * rows
        self._free = list(range(rows - 1, 0, -1))

    def take(self) -> int:
        """A free row, reset. Doubles the table when there is none."""
        if not self._free:
            self._grow()
        row = self._free.pop()
        self.reset(row)
        return row

    def reset(self, row: int) -> None:
        """The one place that clears a row; whatever a sequence may leave behind is cleared here."""
        for name, _ in COLUMNS:
            getattr(self, name)[row] = 0
        self.sequences[row] = None

    def give_back(self, row: int) -> None:
        """Return an ended row."""
        self.reset(row)
        self._free.append(row)

    def sequence(self, row: int) -> Sequence:
        """The sequence of a row that is in use."""
        sequence = self.sequences[row]
        if sequence is None:
            raise KeyError(row)
        return sequence

    def _grow(self) -> None:
        old = self.rows
        self.rows = 2 * old
        for name, dtype in COLUMNS:
            column: NDArray[np.generic] = np.zeros(self.rows, dtype)
            column[:old] = getattr(self, name)
            setattr(self, name, column)
        self.sequences.extend([None] * old)
        self._free.extend(range(self.rows - 1, old - 1, -1))
