"""Device rows of the CUDA runner: whole parameter blocks and block tables, written by the step kernels.

The host keeps what it needs to choose a graph: which rows sample how, and the tables, to see a prefix that all rows
of a step share.

Shape letters: S device rows (row 0 is padding), M table columns, P words of a parameter block, N sampled positions.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from octavo.runner.rows import HostRows
from octavo.runner.sampler import SamplingRows
from octavo.scheduler.plan import (
    P_CHILD,
    P_MIN_P,
    P_ROW,
    P_SEED_HIGH,
    P_SEED_LOW,
    P_TEMPERATURE,
    P_TOP_K,
    P_TOP_P,
    PARAM_WORDS,
    PlanView,
)


class CudaRows:
    """`rows` device rows, padding included, with block tables of `columns` columns."""

    def __init__(self, rows: int, columns: int, device: torch.device) -> None:
        self.device = device
        self.host = HostRows(rows, device)
        self.last_token_S = torch.zeros(rows, dtype=torch.int64, device=device)
        self.tables_SM = torch.zeros((rows, columns), dtype=torch.int32, device=device)
        self.params_SP = torch.zeros((rows, PARAM_WORDS), dtype=torch.int32, device=device)
        self._filtered = np.zeros(rows, np.bool_)
        self._tables = np.zeros((rows, columns), np.int32)
        self._members = b""  # rows that `shared_columns` was asked about last, and its answer
        self._columns = 0
        self._asked = b""  # the same of `any_filters`
        self._filters = False

    def note(self, view: PlanView) -> None:
        """Take a plan's writes into the host's copy."""
        if len(view.params):
            self.host.note(view)
            rows = view.params[:, P_ROW]
            self._filtered[rows] = self.host.random[rows] & self.host.filters[rows]
            self._members = self._asked = b""
        if len(view.table):
            table = view.table
            self._tables[table[:, 0], table[:, 1]] = table[:, 2]
            if self._columns and int(table[:, 1].min()) < self._columns:
                self._members = b""

    def any_filters(self, rows: np.ndarray) -> bool:
        """Whether one of these rows samples through top-k, top-p or min-p."""
        asked = rows.tobytes()
        if asked != self._asked:
            self._asked, self._filters = asked, bool(self._filtered[rows].any())
        return self._filters

    def shared_columns(self, view: PlanView, count: int, block_size: int) -> int:
        """Leading full blocks that the first `count` rows of a plan have in common and have computed."""
        rows = view.device_rows[:count]
        members = rows.tobytes()
        if members != self._members:
            self._members = members
            self._columns = self._compare(rows, int(view.start[: len(rows)].min()) // block_size)
        return self._columns

    def _compare(self, rows: np.ndarray, columns: int) -> int:
        first = self._tables[rows[0], :columns]
        if not columns or (self._tables[rows, 0] != first[0]).any():
            return 0
        same = (self._tables[rows, :columns] == first).all(axis=0)
        return columns if same.all() else int(same.argmin())

    def sampling(self, rows_N: Tensor, position_N: Tensor) -> SamplingRows:
        """The parameters of some rows, gathered, for the torch sampler."""
        words_NP = self.params_SP[rows_N]

        def number(word: int) -> Tensor:
            return words_NP[:, word].contiguous().view(torch.float32)

        def integer(word: int) -> Tensor:
            return words_NP[:, word].to(torch.int64) & 0xFFFFFFFF

        return SamplingRows(
            number(P_TEMPERATURE), integer(P_TOP_K), number(P_TOP_P), number(P_MIN_P), integer(P_SEED_LOW),
            integer(P_SEED_HIGH), integer(P_CHILD), position_N,
        )  # fmt: skip
