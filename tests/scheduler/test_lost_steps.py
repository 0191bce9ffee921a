"""Steps that did not run, with others in flight behind them: nobody goes on from what is not there."""

from __future__ import annotations

import pytest

from tests.scheduler.test_swap import request, scheduler


@pytest.mark.parametrize("blocks", [2, 3, 4])
def test_who_copied_a_lost_block_ends_though_another_has_filled_it_since(blocks):
    made = scheduler(blocks=blocks)
    made.submit(request(1, [1, 2, 3, 4], 5))
    lost = made.plan()
    assert lost is not None
    made.abort(1)
    again = request(2, [1, 2, 3, 4], 5)
    made.submit(again)
    assert made.plan() is not None and made.stats.block_copies == 1
    made.submit(request(3, [5, 6, 7, 8], 5))
    made.plan()
    ended = {end.request_id for end in made.fail(lost)}
    assert 2 in ended and 3 not in ended
    assert made.cached(again) == 0
