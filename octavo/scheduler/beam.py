"""Beams: after each token of a group, every beam becomes a fork of the beam that it goes on from.

A beam request has `n` children and starts with the first alone. When all its running children have their token (only
the candidates count, not the token), the search calls `regroup`; until then they stay in state ENDING and hold their
blocks. Forks share all blocks, copy the last one on their first write, and queue with their blocks in hand, so width
costs a partly filled block a beam and what the beams do not have in common.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

import numpy as np

from octavo.errors import invariant
from octavo.scheduler.slots import ENDING, SHARED_TAIL, WAITING
from octavo.scheduler.state import SchedulerState


def regroup(state: SchedulerState, request_id: int, choices: Items[tuple[int, int]]) -> None:
    """Child i of the request goes on from child `choices[i][0]` with token `choices[i][1]`.

    All running children must be ENDING with nothing in flight. Children beyond `choices` rest.
    """
    slots = state.slots
    rows = sorted(state.requests[request_id], key=lambda row: int(slots.child[row]))
    running = [row for row in rows if slots.state[row] == ENDING]
    invariant(all(slots.in_flight[row] == 0 for row in running), "beams are regrouped when their tokens are there")
    parents = {}
    for row in running:
        state.publish_generated(row, keys=True)
        sequence = slots.sequence(row)
        ids = state.history[slots.device_row[row], : slots.known[row] - 1].copy()
        parents[int(slots.child[row])] = (ids, state.blocks_of(row).copy(), sequence.keys)
    for parent, _ in choices:
        state.pool.hold(parents[parent][1])
    for row in running:
        state.pool.drop(state.blocks_of(row))
        state.device_rows.append(int(slots.device_row[row]))
        slots.device_row[row] = slots.blocks[row] = 0
        slots.state[row] = WAITING
    for row, (parent, token) in zip(rows, choices, strict=False):
        ids, blocks, keys = parents[parent]
        sequence = slots.sequence(row)
        sequence.ids = np.append(ids, np.int32(token))
        sequence.forked, sequence.admitted = blocks.copy(), True
        if state.pool.prefix_cache:
            sequence.keys = keys
            state.add_keys(sequence, sequence.ids)
        slots.known[row] = len(sequence.ids)
        slots.computed[row] = len(ids)
        slots.flags[row] |= SHARED_TAIL
        slots.last_step[row] = 0
        state.enqueue(row)
