"""FakeRunner: its tokens depend on every block it reads, and it refuses what no correct scheduler plans."""

from __future__ import annotations

import ast
import inspect

import numpy as np
import pytest

from octavo.runner import fake
from octavo.runner.base import StepError
from octavo.runner.fake import START, FakeRunner, PlanError, choose, fingerprint, history_step
from octavo.scheduler.features import parameter_block, set_up_block
from octavo.scheduler.plan import HOST_IDS, SAMPLE, PlanDraft
from octavo.types import EngineRequest

SIZE, VOCAB = 4, 500
PROMPT = [7, 8, 9, 10, 11, 12]


class Device:
    """A runner and plans for it, written by hand."""

    def __init__(self) -> None:
        self.runner = FakeRunner(rows=4, max_len=32, block_size=SIZE, blocks=12, vocab_size=VOCAB, host_blocks=3)
        self.draft = PlanDraft(0)
        self.rows: list[tuple[int, int, int, int]] = []
        self.decodes = 0

    def set_up(self, row: int, prompt: list[int], blocks: list[int], **options) -> None:
        ids = np.array(prompt, "<i4").tobytes()
        request = EngineRequest(id=1, prompt=ids, keys=b"", root=b"", limit=32, **options)
        self.draft.params.append(set_up_block(parameter_block(request), row, len(prompt), 0))
        self.draft.write_table(row, np.arange(len(blocks)), np.array(blocks, np.int32))

    def feed(self, row: int, ids: list[int], start: int, sample: bool = True) -> None:
        self.draft.tokens.append(np.array(ids, np.int32))
        self.rows.append((row, start, len(ids), HOST_IDS | SAMPLE * sample))

    def decode(self, row: int, position: int) -> None:
        self.rows.insert(self.decodes, (row, position, 1, SAMPLE))
        self.decodes += 1

    def words(self) -> np.ndarray:
        columns = np.array(self.rows, np.int64).reshape(-1, 4).T
        words = self.draft.encode(columns, self.decodes)
        self.draft, self.rows, self.decodes = PlanDraft(self.draft.step + 1), [], 0
        return words

    def step(self) -> list[int]:
        return self.runner.collect(self.runner.launch(self.words())).tokens.tolist()


def alone(ids: list[int], count: int, mark: int = 0) -> list[int]:
    history = START
    for token in ids:
        _, history = history_step(history, token)
    tokens = []
    for _ in range(count):
        tokens.append(choose(history, mark, frozenset(), VOCAB))
        _, history = history_step(history, tokens[-1])
    return tokens


def running(device: Device, prompt: list[int] = PROMPT, row: int = 1, blocks: list[int] | None = None) -> list[int]:
    device.set_up(row, prompt, blocks or [5, 3, 8])
    device.feed(row, prompt, 0)
    return device.step()


def test_it_knows_nothing_of_the_scheduler():
    nodes = ast.walk(ast.parse(inspect.getsource(fake)))
    modules = [node.module for node in nodes if isinstance(node, ast.ImportFrom)]
    assert not [name for name in modules if name and name.startswith("octavo.scheduler")]


def test_tokens_are_those_of_the_text_alone_whatever_the_chunks():
    device = Device()
    tokens = running(device)
    for position in (6, 7, 8, 9):
        device.decode(1, position)
        tokens += device.step()
    assert tokens == alone(PROMPT, 5)
    device.set_up(2, PROMPT, [1, 2])
    device.feed(2, PROMPT[:3], 0, sample=False)
    assert device.step() == []
    device.feed(2, PROMPT[3:], 3)
    assert device.step() == tokens[:1]


def test_parameters_choose_the_token():
    device = Device()
    device.set_up(1, PROMPT, [1, 2], temperature=0.5, seed=(9 << 40) + 1)
    device.set_up(2, PROMPT, [3, 4], temperature=0.5, seed=1)
    device.feed(1, PROMPT, 0)
    device.feed(2, PROMPT, 0)
    marks = [fingerprint(0, 0.5, 1.0, 0.0, seed, 0, len(PROMPT)) for seed in ((9 << 40) + 1, 1)]
    assert device.step() == [alone(PROMPT, 1, mark)[0] for mark in marks]


@pytest.mark.parametrize("block", [5, 3])
def test_a_changed_block_changes_what_comes_after(block):
    device = Device()
    running(device)
    device.runner.kv[block][0] ^= 1
    device.decode(1, 6)
    assert device.step() != alone(PROMPT, 2)[1:]


def test_a_block_of_another_beginning_is_not_the_same_block():
    """The words of a block depend on what came before it, not on its own tokens only."""
    device = Device()
    running(device, [1, 1, 1, 1, 7, 8, 9, 10], 1, [1, 2])
    running(device, [2, 2, 2, 2, 7, 8, 9, 10], 2, [3, 4])
    assert device.runner.kv[2] != device.runner.kv[4]


def test_copies_and_swaps_keep_the_text():
    device = Device()
    tokens = running(device)
    device.draft.copies += (3, 6)
    device.draft.write_table(1, 1, np.array([6], np.int32))
    device.decode(1, 6)
    tokens += device.step()
    device.draft.swap_out += (5, 2, 6, 0)
    assert device.step() == []
    device.draft.swap_in += (2, 9, 0, 10)
    device.set_up(1, [*PROMPT, *tokens], [9, 10])
    device.feed(1, tokens[-1:], 7)
    assert tokens + device.step() == alone(PROMPT, 3)


def test_a_flipped_byte_in_host_memory_shows():
    device = Device()
    tokens = running(device)
    device.draft.swap_out += (5, 2, 3, 0)
    device.step()
    device.runner.host[2][1] ^= 1
    device.draft.swap_in += (2, 9, 0, 10)
    device.set_up(1, [*PROMPT, *tokens], [9, 10])
    device.feed(1, tokens[-1:], 6)
    assert device.step() != alone(PROMPT, 2)[1:]


def misuse(device: Device, what: str) -> None:
    draft = device.draft
    if what == "block 0":
        draft.write_table(1, 2, np.array([0], np.int32))
    elif what == "row 0":
        device.feed(0, [1], 0)
    elif what == "a row twice":
        device.decode(1, 6)
        device.decode(1, 7)
    elif what == "table twice":
        draft.write_table(np.array([1, 1]), np.array([3, 3]), np.array([1, 2], np.int32))
    elif what == "destination twice":
        draft.copies += (5, 6, 3, 6)
    elif what == "destination is read":
        draft.copies += (5, 6, 6, 7)
    elif what == "swapped over a source":
        draft.copies += (5, 6)
        draft.swap_in += (0, 5)
    elif what == "host block twice":
        draft.swap_out += (5, 1)
        draft.swap_in += (1, 6)
    elif what == "a gap":
        device.decode(1, 7)
    elif what == "no token of its own":
        device.set_up(2, PROMPT, [1, 2])
        device.decode(2, 5)
    elif what == "a table entry that is missing":
        device.set_up(2, PROMPT, [1])
        device.feed(2, PROMPT, 0)
    elif what == "no set-up":
        device.feed(3, [1], 0)
    elif what == "no sample at the end":
        device.set_up(2, PROMPT, [1, 2])
        device.feed(2, PROMPT, 0, sample=False)
    elif what == "two writers":
        device.set_up(2, PROMPT, [8, 9])
        device.feed(2, PROMPT, 0)
        device.set_up(3, PROMPT, [9, 8])
        device.feed(3, PROMPT, 0)
    elif what == "reads what is written now":
        device.set_up(2, PROMPT, [1, 2])
        device.feed(2, PROMPT, 0)
        device.set_up(3, PROMPT, [1, 4])
        device.feed(3, PROMPT[4:], 4)
    elif what == "a token outside the vocabulary":
        device.set_up(2, PROMPT, [1, 2])
        device.feed(2, [VOCAB, *PROMPT[1:]], 0)


@pytest.mark.parametrize(
    "what",
    [
        "block 0", "row 0", "a row twice", "table twice", "destination twice", "destination is read",
        "swapped over a source", "host block twice", "a gap", "no token of its own", "a table entry that is missing",
        "no set-up", "no sample at the end", "two writers", "reads what is written now",
        "a token outside the vocabulary",
    ],
)  # fmt: skip
def test_plans_that_no_scheduler_makes_are_refused(what):
    device = Device()
    running(device)
    misuse(device, what)
    with pytest.raises(PlanError):
        device.runner.launch(device.words())


def test_launched_words_may_not_change_and_results_come_in_order():
    device = Device()
    device.set_up(1, PROMPT, [1, 2])
    device.feed(1, PROMPT, 0)
    words = device.words()
    first = device.runner.launch(words)
    device.decode(1, 6)
    second = device.runner.launch(device.words())
    with pytest.raises(PlanError, match="order"):
        device.runner.collect(second)
    device = Device()
    device.set_up(1, PROMPT, [1, 2])
    device.feed(1, PROMPT, 0)
    words = device.words()
    first = device.runner.launch(words)
    words[2] += 1
    with pytest.raises(PlanError, match="changed"):
        device.runner.collect(first)


def test_faults():
    device = Device()
    tokens = running(device)
    device.runner.inject("bad logits")
    device.decode(1, 6)
    result = device.runner.collect(device.runner.launch(device.words()))
    assert result.bad is not None and result.bad.tolist() == [True]
    device.runner.inject("bad kv")
    device.decode(1, 7)
    device.runner.collect(device.runner.launch(device.words()))
    device.decode(1, 8)
    result = device.runner.collect(device.runner.launch(device.words()))
    assert result.bad is not None, "keys and values that are not finite are noticed by whoever reads them"
    device.runner.inject("collect")
    device.decode(1, 9)
    ticket = device.runner.launch(device.words())
    with pytest.raises(StepError):
        device.runner.collect(ticket)
    device.runner.inject("launch")
    device.decode(1, 10)
    words = device.words()
    with pytest.raises(StepError):
        device.runner.launch(words)
    device.decode(1, 11)
    with pytest.raises(PlanError, match="set up"):
        device.runner.launch(device.words())
    assert running(device) == tokens
