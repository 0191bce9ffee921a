"""Host blocks and the choice between swap and recompute; a sequence's way out and back, plan by plan."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.errors import EngineError
from octavo.scheduler.keys import chain_keys, root_key
from octavo.scheduler.plan import PlanView
from octavo.scheduler.records import Limits
from octavo.scheduler.scheduler import Scheduler
from octavo.scheduler.slots import WAITING
from octavo.scheduler.swap import HostPool, should_swap
from octavo.types import EngineRequest

SIZE = 4


def test_host_blocks_come_back_once():
    pool = HostPool(3)
    blocks = pool.take(2)
    assert len(set(blocks.tolist())) == 2 and pool.free == 1
    pool.give_back(blocks)
    assert pool.free == 3 and not pool.used.any()
    with pytest.raises(EngineError, match="twice"):
        pool.give_back(blocks)
    with pytest.raises(EngineError, match="4 host blocks taken of 3"):
        pool.take(4)


def test_swap_wins_where_moving_is_cheaper_than_computing():
    assert should_swap(100, 0, 7, 7, 2.0)
    assert not should_swap(100, 0, 7, 6, 0.0)  # no room
    assert not should_swap(100, 0, 7, 7, 16.0)  # 7 blocks cost as much as 112 tokens
    assert not should_swap(100, 96, 7, 7, 2.0)  # others keep all but 4 tokens in the prefix cache
    assert not should_swap(0, 0, 0, 7, 0.0)


def request(number: int, prompt: list[int], limit: int) -> EngineRequest:
    ids, root = np.array(prompt, np.int32), root_key(SIZE)
    keys = b"".join(chain_keys(root, ids, SIZE))
    return EngineRequest(id=number, prompt=ids.tobytes(), keys=keys, root=root, limit=limit)


def scheduler(*, blocks: int = 6, host: int = 8, cost: float = 0.0) -> Scheduler:
    return Scheduler(Limits(4, 64, 24, SIZE, blocks + 1, 100, watermark=0, swap_blocks=host, swap_cost=cost))


def step(made: Scheduler) -> PlanView:
    plan = made.plan()
    assert plan is not None
    made.commit(plan, np.full(len(plan.samples), 7, np.int32))
    return PlanView(plan.words)


def test_a_sequence_goes_out_and_comes_back_where_it_was():
    """Two sequences fill six blocks; the later one gives way with 12 computed tokens, until the first ends."""
    made = scheduler()
    made.submit(request(1, [1, 2, 3, 4, 5, 6, 7, 8], 16))
    made.submit(request(2, [11, 12, 13, 14, 15, 16, 17, 18], 14))
    views = [step(made) for _ in range(5)]
    assert all(not len(view.swap_out) for view in views)
    view = step(made)  # both need a fourth block at position 12
    second = made.state.requests[2][0]
    assert made.state.slots.state[second] == WAITING and made.state.slots.computed[second] == 12
    assert len(view.swap_out) == 3 and made.state.host.free == 5
    out = dict(view.swap_out[:, ::-1].tolist())
    while 1 in made.state.requests:
        assert not len(step(made).swap_in)
    # What nobody overwrote is still in the prefix cache and is not moved.
    view = step(made)
    assert set(view.swap_in[:, 0].tolist()) <= out.keys()
    assert view.start.tolist() == [12] and view.length.tolist() == [1]
    assert made.stats.swapped_out_tokens == 12
    assert made.stats.swapped_in_tokens == SIZE * len(view.swap_in)
    assert made.stats.recomputed_tokens == 0 and made.state.host.free == 8


@pytest.mark.parametrize(("host", "cost"), [(2, 0.0), (8, 4.0)])
def test_without_room_or_gain_it_computes_again(host, cost):
    made = scheduler(host=host, cost=cost)
    made.submit(request(1, [1, 2, 3, 4, 5, 6, 7, 8], 16))
    made.submit(request(2, [11, 12, 13, 14, 15, 16, 17, 18], 14))
    for _ in range(6):
        assert not len(step(made).swap_out)
    assert made.stats.preemptions == 1 and made.stats.preempted_tokens == 12
    while made.has_work():
        step(made)
    assert made.stats.recomputed_tokens > 0 and made.stats.swapped_in_tokens == 0


def test_an_abort_frees_the_host_blocks():
    made = scheduler()
    made.submit(request(1, [1, 2, 3, 4, 5, 6, 7, 8], 16))
    made.submit(request(2, [11, 12, 13, 14, 15, 16, 17, 18], 14))
    for _ in range(6):
        step(made)
    assert made.state.host.free == 5
    made.abort(2)
    assert made.state.host.free == 8


def test_a_lost_swap_out_is_computed_again():
    made = scheduler()
    made.submit(request(1, [1, 2, 3, 4, 5, 6, 7, 8], 16))
    made.submit(request(2, [11, 12, 13, 14, 15, 16, 17, 18], 14))
    for _ in range(5):
        step(made)
    plan = made.plan()
    assert plan is not None and len(PlanView(plan.words).swap_out) == 3
    ended = made.fail(plan)
    assert [end.request_id for end in ended] == [1]
    second = made.state.requests[2][0]
    assert made.state.slots.computed[second] == 0 and made.state.host.free == 8
    while made.has_work():
        step(made)
    assert made.stats.swapped_in_tokens == 0
