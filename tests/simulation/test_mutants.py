"""Every planted bug is noticed by the simulator, within a bounded number of steps."""

from __future__ import annotations

import pytest

from tests.simulation.mutants import MUTANTS, hunt

NOTICED: dict[str, str] = {}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
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
