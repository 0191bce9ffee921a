"""SlotTable: the state of every live sequence, one host row each, as numpy columns.

A row is given out at submit and given back when the sequence has ended and nothing of it is in flight. The columns
hold what the fast path of `plan` and `commit` needs; everything rare hangs on the row's `Sequence`. Row 0 is unused,
so that 0 can mean "none". The table doubles when it is full.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from octavo.types import EngineRequest

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]

# States of a row.
EMPTY = 0
WAITING = 1  # in the queue: no device row; holds blocks only when forked, host blocks only when swapped out
PREFILL = 2  # has a device row and a gap between known and computed tokens that the host must feed
DECODE = 3  # has a device row; its one uncomputed token is the device's last token
ENDING = 4  # every token it may have is computed or in flight; waits for the commit
PREEMPTED = 5  # blocks are gone; goes back to the queue when nothing of it is in flight
DEAD = 6  # ended; goes back to the table when nothing of it is in flight
STATES = ("empty", "waiting", "prefill", "decode", "ending", "preempted", "dead")

# Row flags: anything that makes the fast path look closer.
SHARED_TAIL = 2  # the next block written may be shared: copy on write
IS_RARE = 4  # the step needs the uncaptured sampler
IS_BEAM = 8  # after each token the sequence stays ENDING until `octavo.scheduler.beam.regroup` says how it goes on

COLUMNS = (
    "state",
    "known",  # tokens that exist, sampled ones in flight included
    "computed",  # tokens whose K and V are written once every plan made so far has run
    "limit",  # the sequence ends when it has this many tokens
    "flags",
    "in_flight",  # planned steps that are not committed
    "device_row",
    "blocks",  # columns in use of its block table (`SchedulerState.table`), while it has a device row
    "order",  # order key: smaller is served first, larger gives way first; kept through preemption
    "last_step",
    "request_id",
    "child",
    "tenant",  # its number, see `octavo.scheduler.policy.WaitingQueue`
)


@dataclass(slots=True, eq=False)
class Sequence:
    """What a row has beside its columns.

    ids: the known tokens while it has no device row. keys: of the leading full blocks of the known tokens, joined.
    params: its parameter block, but for device row and length. forked: blocks that it holds while it waits, shared
    with the sequence whose prompt it continues. dormant: the other children of the request, until the prompt is
    computed. given_up: blocks that a preemption or the end took while steps were in flight. host: host blocks that
    hold its computed tokens since a preemption, written by the plan of step swap_step. reached: most tokens that it
    had computed when it gave way. cached: prompt tokens found in the prefix cache at first admission. scheduled_us:
    when that was. recomputed, swapped: tokens computed again, and brought back from the host, after preemptions.
    """

    request: EngineRequest
    row: int
    ids: I32
    keys: bytes
    params: I32
    end_ids: frozenset[int] = frozenset()
    forked: I64 | None = None
    dormant: list[Sequence] = field(default_factory=list)
    given_up: I64 | None = None
    host: I64 | None = None
    swap_step: int = 0
    reached: int = 0
    preemptions: int = 0
    cached: int = 0
    admitted: bool = False
    scheduled_us: int = 0
    recomputed: int = 0
    swapped: int = 0


class SlotTable:
    """Columns of `COLUMNS` as attributes (int64, one entry a row), `sequences[row]`, and the free rows."""

    state: I64
    known: I64
    computed: I64
    limit: I64
    flags: I64
    in_flight: I64
    device_row: I64
    blocks: I64
    order: I64
    last_step: I64
    request_id: I64
    child: I64
    tenant: I64

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self._name(np.zeros((len(COLUMNS), rows), np.int64))
        self.sequences: list[Sequence | None] = [None] * rows
        self._free = list(range(rows - 1, 0, -1))

    def _name(self, data: I64) -> None:
        self._data = data
        for name, column in zip(COLUMNS, data, strict=True):
            setattr(self, name, column)

    def columns(self) -> I64:
        """All columns as one array [len(COLUMNS), rows], for checks."""
        return self._data

    def take(self) -> int:
        """A free row, all zeros. Doubles the table when there is none."""
        if not self._free:
            self._grow()
        return self._free.pop()

    def give_back(self, row: int) -> None:
        """Return an ended row. The one place that clears what a sequence may leave behind."""
        self._data[:, row] = 0
        self.sequences[row] = None
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
        data = np.zeros((len(COLUMNS), self.rows), np.int64)
        data[:, :old] = self._data
        self._name(data)
        self.sequences.extend([None] * old)
        self._free.extend(range(self.rows - 1, old - 1, -1))
