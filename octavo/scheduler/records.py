"""What goes into the scheduler and comes out of it: limits, counters, steps in flight, new tokens, ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from octavo.scheduler.plan import swap_capacity, table_capacity

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]

# Words of EXTRAS that the fixed parts of one request may take (see `octavo.types` for its limits).
EXTRAS_WORDS = 24576

MIXED_FLOOR = 32

# Why a sequence ended; 0 means that it goes on.
RUNNING, STOP, LENGTH, ABORT, ERROR, TIMEOUT = range(6)
REASONS = ("", "stop", "length", "abort", "error", "timeout")


@dataclass(frozen=True, slots=True)
class Limits:
    """What the scheduler may use. `blocks` counts the padding block; `watermark` blocks stay free at admission.

    max_num_batched_tokens: tokens of one step. mixed_prefill: while rows decode, the host feeds at most so many
    tokens for each of them in one step, but may always feed `MIXED_FLOOR`; 0: as many as the step takes.
    swap_blocks: KV blocks of host memory; swap_cost: tokens that could be computed while one block goes there and
    comes back (see `octavo.config.swap_cost`).
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    blocks: int
    vocab_size: int
    prefix_cache: bool = True
    watermark: int = 0
    policy: str = "fcfs"
    low_first: bool = False
    mixed_prefill: int = 0
    swap_blocks: int = 0
    swap_cost: float = 0.0

    @property
    def max_blocks_per_seq(self) -> int:
        """Columns of the block table."""
        return -(-self.max_model_len // self.block_size)

    @property
    def extras_capacity(self) -> int:
        """Words of EXTRAS in one plan: at least what one sequence can ask for."""
        return EXTRAS_WORDS + 2 * self.max_model_len

    @property
    def table_capacity(self) -> int:
        """Most block-table writes of one plan."""
        return table_capacity(self.max_num_seqs, self.max_blocks_per_seq)

    @property
    def swap_capacity(self) -> int:
        """Most blocks that one plan swaps in one direction."""
        return swap_capacity(self.max_blocks_per_seq)


@dataclass(slots=True)
class Stats:
    """Counters since the start. Prefix hits count first admissions only; what preemption costs is kept apart.

    preempted_tokens: computed tokens that sequences gave up with their blocks. swapped_out_tokens of them went to the
    host and swapped_in_tokens came back; recomputed_tokens were computed again. The rest was still in the prefix
    cache, or its sequence ended.
    """

    prompt_tokens: int = 0
    prefix_hit_tokens: int = 0
    prompt_tokens_computed: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    preempted_tokens: int = 0
    recomputed_tokens: int = 0
    swapped_out_tokens: int = 0
    swapped_in_tokens: int = 0
    forks: int = 0
    block_copies: int = 0
    steps: int = 0
    peak_blocks: int = 0


@dataclass(slots=True, eq=False)
class Step:
    """A plan in flight: the encoded `words`, and what `commit` needs of it. One entry a row, rows are host rows."""

    number: int
    words: I32
    rows: I64
    device_rows: I64
    end: I64  # position after the last token that the row computes, where a sampled token goes
    samples: I64  # positions in `rows` of the rows that sample, in order
    published: list[tuple[int, I64]]  # (host row, blocks) entered in the prefix index by this plan
    copied: dict[int, list[int]]  # cached blocks, and the host rows whose last block this plan makes a copy of it


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of one sequence; every admitted sequence has exactly one.

    scheduled_us: when it first got a device row, in microseconds of the clock that the engine's loop reads; 0: never.
    recomputed_tokens, swapped_tokens: what coming back after preemptions took.
    """

    request_id: int
    child: int
    reason: int
    cached_tokens: int
    preemptions: int
    scheduled_us: int = 0
    recomputed_tokens: int = 0
    swapped_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Preemption:
    """Who gave way last, in which step, with how many computed tokens, to whom and why."""

    step: int
    request_id: int
    child: int
    tokens: int
    to_request: int
    why: str


@dataclass(slots=True)
class TokenBatch:
    """New tokens of one committed step as columns, and every sequence that ended since the last batch.

    `logprobs` maps a position in the columns to what the runner returned for it. `prompts` holds what it returned for
    chunks of prompts: request, position of the first token that is reported on, one entry a token.
    """

    request_id: I64
    child: I64
    token: I32
    ended: list[Ended] = field(default_factory=list)
    logprobs: Mapping[int, object] = field(default_factory=dict)
    prompts: list[tuple[int, int, Sequence[object]]] = field(default_factory=list)

    @classmethod
    def of_ends(cls, ended: list[Ended]) -> TokenBatch:
        """A batch without tokens."""
        return cls(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.int32), ended)
