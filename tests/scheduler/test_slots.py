"""SlotTable: rows come empty, leave nothing behind, and there are always more."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.scheduler.slots import COLUMNS, Sequence, SlotTable
from octavo.types import EngineRequest


def sequence(row: int) -> Sequence:
    request = EngineRequest(id=row, prompt=b"\1\0\0\0", keys=b"", root=b"", limit=2)
    return Sequence(request, row, np.ones(1, np.int32), [], np.zeros(16, np.int32))


def test_row_0_is_never_given_out():
    table = SlotTable(4)
    assert sorted(table.take() for _ in range(3)) == [1, 2, 3]


def test_a_row_comes_back_empty():
    table = SlotTable(4)
    row = table.take()
    for name in COLUMNS:
        getattr(table, name)[row] = 7
    table.sequences[row] = sequence(row)
    table.give_back(row)
    assert not table.columns().any()
    assert table.take() == row
    with pytest.raises(KeyError):
        table.sequence(row)


def test_the_table_doubles_and_keeps_what_it_has():
    table = SlotTable(4)
    rows = [table.take() for _ in range(9)]
    assert len(set(rows)) == 9 and table.rows == 16
    for row in rows:
        table.known[row] = 100 + row
        table.sequences[row] = sequence(row)
    more = [table.take() for _ in range(20)]
    assert not set(more) & set(rows)
    assert [int(table.known[row]) for row in rows] == [100 + row for row in rows]
    assert table.sequence(rows[0]).row == rows[0]
    assert table.columns().shape == (len(COLUMNS), table.rows)
