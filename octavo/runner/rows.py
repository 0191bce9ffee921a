"""Device rows: what the device keeps of each running sequence between steps.

A row is set up by a parameter block of a plan and then lives on the device: its last token never visits the host
to come back. Parameters are mirrored in numpy where the host must choose a code path.

Shape letters: S device rows (row 0 is padding), M table columns, N sampled positions.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from octavo.runner.edits import Edits, note_edits
from octavo.runner.sampler import SamplingRows
from octavo.scheduler.plan import (
    P_CHILD,
    P_LOGPROBS,
    P_MIN_P,
    P_ROW,
    P_SEED_HIGH,
    P_SEED_LOW,
    P_TEMPERATURE,
    P_TOP_K,
    P_TOP_P,
    PlanView,
)


class HostRows:
    """What the host must know of `rows` device rows to choose a code path, and what they want of their logits.

    random: samples at a temperature. filters: uses top-k, top-p or min-p. logprobs: how many are asked for, -1 none.
    edits: row -> changes to its logits.
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        self.device = device
        self.random = np.zeros(rows, np.bool_)
        self.filters = np.zeros(rows, np.bool_)
        self.logprobs = np.full(rows, -1, np.int32)
        self.edits: dict[int, Edits] = {}

    def note(self, view: PlanView) -> None:
        """Take in the parameter blocks and extras of a plan."""
        params = view.params
        rows = params[:, P_ROW]
        temperature, top_p, min_p = (
            params[:, column].copy().view(np.float32) for column in (P_TEMPERATURE, P_TOP_P, P_MIN_P)
        )
        self.random[rows] = temperature > 0
        self.filters[rows] = (top_p < 1) | (min_p > 0) | (params[:, P_TOP_K] > 0)
        self.logprobs[rows] = params[:, P_LOGPROBS]
        note_edits(self.edits, view)

    def put(self, words: np.ndarray) -> Tensor:
        """Words as an int64 tensor on the device."""
        return torch.from_numpy(words.astype(np.int64)).to(self.device)

    def put_as_is(self, array: np.ndarray) -> Tensor:
        """An array as a tensor of its own type on the device."""
        return torch.from_numpy(array).to(self.device)


class Rows(Protocol):
    """What the torch sampler needs of device rows."""

    device: torch.device
    host: HostRows
    last_token_S: Tensor

    def sampling(self, rows_N: Tensor, position_N: Tensor) -> SamplingRows:
        """The parameters of some rows, gathered."""
        ...


class DeviceRows:
    """Last token, block table and sampling parameters of `rows` device rows (padding row included)."""

    def __init__(self, rows: int, columns: int, device: torch.device) -> None:
        def ints() -> Tensor:
            return torch.zeros(rows, dtype=torch.int64, device=device)

        def floats() -> Tensor:
            return torch.zeros(rows, dtype=torch.float32, device=device)

        self.device = device
        self.host = HostRows(rows, device)
        self.last_token_S = ints()
        self.tables_SM = torch.zeros((rows, columns), dtype=torch.int32, device=device)
        self.top_k_S, self.seed_low_S, self.seed_high_S, self.child_S = ints(), ints(), ints(), ints()
        self.temperature_S, self.top_p_S, self.min_p_S = floats(), floats(), floats()

    def apply(self, view: PlanView) -> None:
        """Set rows up and write block tables as the plan says."""
        if len(view.params):
            self._set_up(view)
        if len(view.table):
            table = self.host.put(view.table)
            self.tables_SM[table[:, 0], table[:, 1]] = table[:, 2].to(torch.int32)

    def _set_up(self, view: PlanView) -> None:
        params = view.params
        self.host.note(view)
        rows = self.host.put(params[:, P_ROW])
        for column, target in (
            (P_TOP_K, self.top_k_S),
            (P_SEED_LOW, self.seed_low_S),
            (P_SEED_HIGH, self.seed_high_S),
            (P_CHILD, self.child_S),
        ):
            target[rows] = self.host.put(params[:, column]) & 0xFFFFFFFF
        for column, target in (
            (P_TEMPERATURE, self.temperature_S),
            (P_TOP_P, self.top_p_S),
            (P_MIN_P, self.min_p_S),
        ):
            target[rows] = torch.from_numpy(params[:, column].copy().view(np.float32)).to(self.device)

    def sampling(self, rows_N: Tensor, position_N: Tensor) -> SamplingRows:
        """The parameters of some rows, gathered."""
        return SamplingRows(
            self.temperature_S[rows_N],
            self.top_k_S[rows_N],
            self.top_p_S[rows_N],
            self.min_p_S[rows_N],
            self.seed_low_S[rows_N],
            self.seed_high_S[rows_N],
            self.child_S[rows_N],
            position_N,
        )
