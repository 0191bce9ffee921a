"""The seam between engine and device: what a runner is.

A runner gets the words of one step plan after the other (`octavo.scheduler.plan` has the format) and returns the
sampled tokens. It knows nothing of requests and nothing of why a plan is as it is. Plans are launched in order and
collected in order; between the two calls other plans may be launched. The words of a launched plan are not changed
by anybody.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one sampled position: of the chosen token, its rank (1 = best), and of the best ids."""

    chosen: float
    rank: int
    ids: NDArray[np.int32]
    values: NDArray[np.float32]


@dataclass(slots=True)
class StepResult:
    """What one step sampled: one token for each row flagged SAMPLE, in row order.

    bad: True where the logits were not finite (None when all were). logprobs: sample -> TokenLogprobs for rows that
    asked. prompts: row of the step -> position of the first prompt token reported on, and one TokenLogprobs a token.
    """

    tokens: NDArray[np.int32]
    bad: NDArray[np.bool_] | None = None
    logprobs: dict[int, TokenLogprobs] | None = None
    prompts: dict[int, tuple[int, list[TokenLogprobs]]] | None = None


class StepError(RuntimeError):
    """One step could not run, but the device is sound: its sequences fail, the engine goes on."""


class Runner(Protocol):
    """Executes plans. `launch` may return before the work is done; `collect` waits for it.

    swap_blocks: KV blocks of host memory that plans may name, from 0. Swaps are done in the order of the plan format
    and of the plans: what one plan writes to the host, the next may read, and what it has read, the next may write.
    """

    swap_blocks: int

    def launch(self, words: NDArray[np.int32]) -> Any:
        """Start a step; returns a ticket for `collect`. Raises StepError when only this step is lost."""

    def collect(self, ticket: Any) -> StepResult:
        """The result of the oldest launched step that is not collected."""

    def close(self) -> None:
        """Free the device's memory; no other call follows."""
