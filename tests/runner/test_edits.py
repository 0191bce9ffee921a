"""Changes to logits: bans, biases, penalties, on numpy and on torch logits, against the formulas written out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from octavo.runner.edits import Edits, note_edits
from octavo.scheduler.features import rare_words
from octavo.scheduler.plan import PlanDraft, PlanView
from octavo.types import EngineRequest

VOCAB = 32
PROMPT = np.array([3, 4, 4, 9], np.int32)
OUTPUT = np.array([9, 9, 7], np.int32)


def edits_of(output: np.ndarray = OUTPUT[:0], **fields: Any) -> Edits:
    """The edits of a row that is set up after the prompt and `output`, through an encoded plan."""
    request = EngineRequest(id=1, prompt=PROMPT.tobytes(), keys=b"", root=b"", limit=50, **fields)
    draft = PlanDraft(1)
    draft.params.append(np.array([5] + [0] * 15, np.int32))
    draft.extras += rare_words(request, 5, np.concatenate((PROMPT, output)))
    none = np.empty(0, np.int64)
    found = {5: Edits(), 6: Edits()}
    note_edits(found, PlanView(draft.encode((none, none, none, none), 0)))
    return found.get(5, Edits())


def logits(kind: str) -> Any:
    values = np.random.default_rng(0).normal(0, 3, VOCAB)
    return {"numpy": values.astype(np.float32), "torch": torch.from_numpy(values).float()}[kind]


def applied(edits: Edits, kind: str, position: int = 10) -> np.ndarray:
    row = logits(kind)
    edits.apply(row, position, torch.from_numpy if kind == "torch" else lambda array: array)
    return np.asarray(row)


@pytest.fixture(params=["numpy", "torch"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_nothing_wanted_nothing_changed(kind: str) -> None:
    assert rare_words(EngineRequest(id=1, prompt=PROMPT.tobytes(), keys=b"", root=b"", limit=9), 5, PROMPT) == []
    assert np.array_equal(applied(Edits(), kind), logits("numpy"))


@pytest.mark.parametrize(
    ("repetition", "presence", "frequency"), [(1.5, 0, 0), (0.7, 0, 0), (1, 0.6, 0), (1, 0, -0.8), (1.3, 1.5, 0.25)]
)
@pytest.mark.parametrize("known", [0, 1, 3])
def test_penalties(kind: str, repetition: float, presence: float, frequency: float, known: int) -> None:
    """The first `known` output tokens come with the set-up, as after a preemption, the others one by one."""
    edits = edits_of(
        OUTPUT[:known],
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
    )
    for token in OUTPUT[known:].tolist():
        edits.took(token)
    expected = logits("numpy").astype(np.float64)
    for token in range(VOCAB):
        if token in PROMPT or token in OUTPUT:
            expected[token] *= 1 / repetition if expected[token] > 0 else repetition
        count = int((OUTPUT == token).sum())
        expected[token] -= frequency * count + presence * (count > 0)
    assert np.allclose(applied(edits, kind), expected, atol=1e-5)


def test_bias(kind: str) -> None:
    edits = edits_of(bias=((2, 7), (100.0, -3.5)))
    expected = logits("numpy")
    expected[[2, 7]] += np.array([100.0, -3.5], np.float32)
    assert np.allclose(applied(edits, kind), expected)


def test_allowed_ids(kind: str) -> None:
    out = applied(edits_of(allowed=(1, 30)), kind)
    assert np.flatnonzero(np.isfinite(out)).tolist() == [1, 30]
    assert np.array_equal(out[[1, 30]], logits("numpy")[[1, 30]])


def test_end_ids_below_min_tokens(kind: str) -> None:
    edits = edits_of(min_tokens=3, eos=(2, 7), stop_ids=(9,))
    for position in range(4, 10):
        banned = np.flatnonzero(~np.isfinite(applied(edits, kind, position))).tolist()
        assert banned == ([2, 7, 9] if position < 7 else [])


def test_min_tokens_bans_beat_a_bias(kind: str) -> None:
    """CASE B-12: a bias towards an end id does not get it past `min_tokens`."""
    edits = edits_of(min_tokens=3, eos=(2,), bias=((2,), (100.0,)))
    assert applied(edits, kind, 5)[2] == -np.inf
    assert np.isfinite(applied(edits, kind, 7)[2])


def test_bad_words(kind: str) -> None:
    """Single tokens always, longer sequences while what comes before their last token is there; prompt included."""
    edits = edits_of(bad=((11,), (4, 9, 20), (9, 21), (20, 20, 20, 22)))

    def banned() -> list[int]:
        return np.flatnonzero(~np.isfinite(applied(edits, kind))).tolist()

    assert banned() == [11, 20, 21]  # the prompt ends in 4, 9
    edits.took(20)
    assert banned() == [11]
    edits.took(20)
    edits.took(20)
    assert banned() == [11, 22]
    edits.took(9)
    assert banned() == [11, 21]
    again = edits_of(np.array([20, 20, 20], np.int32), bad=((11,), (20, 20, 20, 22)))
    assert np.flatnonzero(~np.isfinite(applied(again, kind))).tolist() == [11, 22]


def test_rows_that_are_set_up_again_forget() -> None:
    found = {5: Edits(), 6: Edits()}
    draft = PlanDraft(1)
    draft.params.append(np.array([5] + [0] * 15, np.int32))
    none = np.empty(0, np.int64)
    note_edits(found, PlanView(draft.encode((none, none, none, none), 0)))
    assert list(found) == [6]
