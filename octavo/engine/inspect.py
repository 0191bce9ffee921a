"""A picture of the KV cache for people: which sequence holds which block, what is shared, what is only remembered."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np

from octavo.engine.kv_text import kv_text as kv_text
from octavo.scheduler.slots import DEAD, EMPTY, STATES
from octavo.scheduler.state import SchedulerState
from octavo.scheduler.usage import usage


def kv_state(state: SchedulerState) -> dict[str, Any]:
    """Plain values for JSON; O(blocks).

    Blocks are numbered from 1; block 0 is padding and not counted. `owners`: for each block the number of sequences
    that hold it. `cached`: blocks whose content is in the prefix index, as ids. `tables`: one entry for each live
    sequence, with its blocks in order. `last_preemption`: who gave way last, to whom and why, or None.
    """
    pool, slots = state.pool, state.slots
    now = usage(state)
    tables = []
    for row in np.flatnonzero((slots.state != EMPTY) & (slots.state != DEAD)).tolist():
        sequence = slots.sequence(row)
        tables.append(
            {
                "request": int(slots.request_id[row]),
                "child": int(slots.child[row]),
                "state": STATES[slots.state[row]],
                "tokens": int(slots.known[row]),
                "computed": int(slots.computed[row]),
                "limit": int(slots.limit[row]),
                "cached_tokens": sequence.cached,
                "preemptions": sequence.preemptions,
                "recomputed_tokens": sequence.recomputed,
                "swapped_tokens": sequence.swapped,
                "blocks": state.blocks_of(row).tolist(),
                "host_blocks": [] if sequence.host is None else sequence.host.tolist(),
            }
        )
    return {
        "block_size": state.limits.block_size,
        "total_blocks": pool.usable,
        "free_blocks": pool.free,
        "used_blocks": pool.usable - pool.free,
        "host_blocks": state.host.blocks,
        "free_host_blocks": state.host.free,
        "live_tokens": now.slots - now.waste,
        "waste_tokens": now.waste,
        "owners": pool.ref[1:].tolist(),
        "cached": pool.index.blocks(),
        "tables": tables,
        "last_preemption": None if state.last_preemption is None else asdict(state.last_preemption),
    }
