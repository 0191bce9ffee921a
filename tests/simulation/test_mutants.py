"""Every planted bug is noticed by the simulator, within a bounded number of steps."""

from __future__ import annotations

import pytest

from tests.simulation.mutants import MUTANTS, hunt

NOTICED: dict[str, str] = {}

# Not noticed within the steps of `hunt`: either the traffic does not lead there yet, or another check hides them.
OPEN = {
    "a published block is written in place unseen",
    "victim chosen again",
    "a plan is larger than the table section",
    "who shared a lost block goes on",
    "who gave a lost block up goes on",
}


def _param(mutant):
    marks = [pytest.mark.xfail(reason="not noticed yet", strict=False)] if mutant.name in OPEN else []
    return pytest.param(mutant, id=mutant.name, marks=marks)


@pytest.mark.parametrize("mutant", [_param(mutant) for mutant in MUTANTS])
def test_a_planted_bug_is_noticed(mutant):
    NOTICED[mutant.name] = hunt(mutant)
    assert NOTICED[mutant.name], f"{mutant.name}: not noticed"


def test_the_list(capsys):
    """Prints how each was noticed; there are enough of them, and all edits are different."""
    with capsys.disabled():
        print()
        for name, how in NOTICED.items():
            print(f"  {name:48} {how[:110]}")
    assert len({(mutant.function, mutant.old, mutant.new) for mutant in MUTANTS}) == len(MUTANTS) >= 25
