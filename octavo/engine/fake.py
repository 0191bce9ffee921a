"""A test tool: an engine without a model, `load_format="fake"`, to put load and faults on everything around it.

The next token is a hash of the last one and its position, so equal prompts get equal answers. A step costs
microseconds, or with "fake:MS" at least so many milliseconds. A prompt that ends in `TRIGGER` and one of `FAULTS`
makes its step fail in that way. The tokenizer, and with it the vocabulary, is the named model's. Never use it to
serve people.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.config import EngineConfig, Hardware, ModelFacts, resolve
from octavo.engine.build import Engine, start_engine
from octavo.errors import EngineError
from octavo.runner.base import StepError, StepResult, TokenLogprobs
from octavo.scheduler.plan import HOST_IDS, P_LOGPROBS, P_ROW, SAMPLE, PlanView

VOCABULARY = 49152
MAX_POSITIONS = 8192
TRIGGER = (11, 13)
FAULTS = {3: "bad numbers", 4: "a failed step", 5: "a broken device"}
_FIRST = 64  # smallest id that is made: not a control token


class FakeEngineRunner:
    """Implements `octavo.runner.base.Runner` in numpy, without any KV cache."""

    def __init__(self, rows: int, seconds: float) -> None:
        self._seconds = seconds
        self._last = np.zeros(rows + 1, np.int64)
        self._logprobs = np.full(rows + 1, -1, np.int64)
        self.swap_blocks = 0

    def launch(self, words: NDArray[np.int32]) -> Any:
        """One step, done at once. Raises as the prompts wish."""
        time.sleep(self._seconds)
        view = PlanView(words)
        self._logprobs[view.params[:, P_ROW]] = view.params[:, P_LOGPROBS]
        rows, starts, lengths, flags = view.device_rows, view.start, view.length, view.flags
        at, bad = 0, np.zeros(len(rows), np.bool_)
        for i in np.flatnonzero(flags & HOST_IDS).tolist():
            at += int(lengths[i])
            last = int(view.tokens[at - 1])
            self._last[rows[i]] = last
            if flags[i] & SAMPLE and last in FAULTS and tuple(view.tokens[at - 3 : at - 1].tolist()) == TRIGGER:
                bad[i] = self._act_up(last)
        picked = np.flatnonzero(flags & SAMPLE)
        position = (starts + lengths)[picked].astype(np.int64)
        token = (self._last[rows[picked]] * 2654435761 + position * 40503) % 1000003 % (VOCABULARY - _FIRST) + _FIRST
        self._last[rows[picked]] = token
        result = StepResult(token.astype(np.int32), bad[picked] if bad.any() else None)
        asked = self._logprobs[rows[picked]]
        if (asked >= 0).any():
            result.logprobs = {
                i: _logprobs(int(token[i]), int(asked[i])) for i in np.flatnonzero(asked >= 0).tolist()
            }
        return result

    def collect(self, ticket: Any) -> StepResult:
        """The result of a launch."""
        result: StepResult = ticket
        return result

    def close(self) -> None:
        """Nothing to free."""

    def _act_up(self, fault: int) -> bool:
        if FAULTS[fault] == "a failed step":
            raise StepError("a fault that the prompt asked for")
        if FAULTS[fault] == "a broken device":
            raise EngineError("A fault that the prompt asked for.", "Leave it out.")
        return True


def _logprobs(token: int, count: int) -> TokenLogprobs:
    ids = np.array([token, *range(_FIRST, _FIRST + max(count - 1, 0))][:count], np.int32)
    return TokenLogprobs(-0.5, 1, ids, -0.5 - np.arange(len(ids), dtype=np.float32))


def fake_engine(config: EngineConfig, eos_ids: tuple[int, ...]) -> Engine:
    """An engine around the fake runner, with the numbers that `config` gives for a small model."""
    pace = float(config.model.load_format.partition(":")[2] or 0) / 1000
    hardware = Hardware("cpu", 4 << 30)
    facts = resolve(config, hardware, ModelFacts(MAX_POSITIONS, 1024, "float32", 1 << 20))
    runner = FakeEngineRunner(facts.max_num_seqs, pace)
    return start_engine(facts, VOCABULARY, eos_ids, runner, steady=True)
