"""What the scheduler costs the host: CPU time of `plan` and `commit` at batch 256 on the churn mix."""

from __future__ import annotations

import pytest

from octavo.bench.host import measure

GOAL = 150  # microseconds, median, on two cores of a server processor
GUARD = 500  # what no machine of the last years should pass; catches work that grows with the queue or the pool


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
def test_no_step_does_work_that_grows(policy):
    cost = measure(batch=256, steps=300, policy=policy)
    print(cost)
    assert cost.median < GUARD


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
def test_the_goal(policy):
    """Holds on a quiet machine."""
    cost = measure(batch=256, steps=1500, policy=policy)
    print(cost)
    assert cost.median < GOAL
