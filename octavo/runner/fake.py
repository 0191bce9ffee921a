"""FakeRunner: a runner without a model, whose every token depends on every block it should have read.

It knows a plan by its bytes only (its own parser, written from the format, so that encoder and decoder cannot share
a mistake), keeps its own device rows, and stores in each simulated KV block what stands for keys and values: one
32-bit word a position, made from the token and from everything before it *as read back through the block table*.
The next token is a hash of that history. A wrong, stale or uncopied block, a wrong position or a left-over sampling
parameter therefore changes the output, and `history_step` and `choose` say what it should have been.

Order on the device: swap-out, copies, swap-in, parameters and table writes, forward, sampling. What no correct plan
contains raises `PlanError`: block or row 0, two writes of one table entry, a destination that is read or written
twice, a gap between positions, a row that reads what another row writes in the same step.

Faults are injected with `inject` and hit the next launch: "launch" runs nothing, and its rows must be set up again;
"collect" loses the result and leaves rubbish in what the step wrote, on the device and on the host; "bad kv" makes
one row's new keys and values not finite, which whoever reads them later reports; "bad logits" and "bad token" spoil
one sample.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from octavo.errors import EngineError
from octavo.runner.base import StepError, StepResult, TokenLogprobs

Words = NDArray[np.int32]

_MAGIC, _VERSION, _HEADER = 0x4F435456, 1, 32
_WIDTHS = (4, 3, 2, 2, 2, 16, 1, 1)
_SAMPLE, _HOST_IDS, _RARE = 1, 2, 4
_BAN_UNTIL = 1
_EXTRAS = range(1, 7)  # kinds; this model only knows what to do about the first

START = 0x0C7A50  # the history before the first token
_RUBBISH = 0x5A5A5A5A
BAD = 0xFFFFFFFF  # the word of a position whose keys and values are not finite
_MASK = 0xFFFFFFFF
_WORD = struct.Struct("<I")
_FINGERPRINT = struct.Struct("<i3f2Iii")

FAULTS = ("launch", "collect", "bad logits", "bad kv", "bad token")


class PlanError(EngineError):
    """A plan that no correct scheduler makes."""


def history_step(history: int, token: int) -> tuple[int, int]:
    """The KV word of `token` after `history`, and the history that includes it."""
    word = ((history ^ (token * 0x9E3779B1 + 0x7F4A7C15)) * 0x85EBCA6B) & _MASK
    word ^= word >> 15
    if word == BAD:
        word = 1
    return word, crc32(_WORD.pack(word), history)


def fingerprint(
    top_k: int, temperature: float, top_p: float, min_p: float, seed: int, child: int, prompt: int
) -> int:
    """What sampling parameters do to the choice of a token; 0 when greedy."""
    if temperature == 0:
        return 0
    low, high = seed & _MASK, seed >> 32
    return crc32(_FINGERPRINT.pack(top_k, temperature, top_p, min_p, low, high, child, prompt))


def choose(history: int, mark: int, banned: frozenset[int], vocab_size: int) -> int:
    """The token after `history` under parameters with fingerprint `mark`; one at least must not be banned."""
    word = ((history ^ mark) * 0xC2B2AE35 + 0x27D4EB2F) & _MASK
    token = (word >> 7) % vocab_size
    while token in banned:
        token = (token + 1) % vocab_size
    return token


class _Row:
    """One device row between a set-up and the next."""

    __slots__ = ("ban_until", "banned", "length", "logprobs", "mark", "next", "table", "token")

    def __init__(self, columns: int, params: Sequence[int]) -> None:
        _, self.length, _, top_k, *floats = params[:7]
        low, high, child, self.logprobs, prompt = params[7:12]
        temperature, top_p, min_p = struct.unpack("<3f", struct.pack("<3i", *floats))
        seed = (low & _MASK) | (high & _MASK) << 32
        self.mark = fingerprint(top_k, temperature, top_p, min_p, seed, child, prompt)
        self.table = [0] * columns
        self.next: int | None = None  # first position that is not computed; None: wherever the first chunk starts
        self.token: int | None = None  # the token it sampled last
        self.ban_until, self.banned = 0, frozenset[int]()


@dataclass(slots=True)
class Ticket:
    """A launched step: its result, or why it was lost; the plan's words, to see that nobody changes them."""

    words: Words
    checksum: int
    result: StepResult | None


class FakeRunner:
    """Implements `octavo.runner.base.Runner` for `rows` sequences of up to `max_len` tokens.

    `blocks` and `host_blocks` count KV blocks on the device (padding block included) and on the host. A launch
    computes, `collect` returns. written: blocks that the last launch wrote. tainted, tainted_host: blocks that
    hold a BAD word. unsound: samples so far whose history holds one, and whose result was not lost.
    """

    def __init__(
        self, *, rows: int, max_len: int, block_size: int, blocks: int, vocab_size: int, host_blocks: int = 0
    ) -> None:
        self.block_size, self.vocab_size, self.swap_blocks = block_size, vocab_size, host_blocks
        self.columns = -(-max_len // block_size)
        garbage = Random(blocks)
        self.kv = [bytearray(garbage.randbytes(4 * block_size)) for _ in range(blocks)]
        self.host = [bytearray(garbage.randbytes(4 * block_size)) for _ in range(host_blocks)]
        self.rows: list[_Row | None] = [None] * (rows + 1)
        self.written: set[int] = set()
        self.tainted: set[int] = set()
        self.unsound = 0
        self.tainted_host: set[int] = set()
        self._pending: deque[Ticket] = deque()
        self._fault = ""
        self._victim = 0

    def inject(self, fault: str, victim: int = 0) -> None:
        """Let the next launch fail in one of the ways of `FAULTS`; `victim` picks a row, or a sample."""
        self._fault, self._victim = fault, victim

    @property
    def armed(self) -> bool:
        """Whether a fault waits for the next launch."""
        return bool(self._fault)

    def launch(self, words: Words) -> Ticket:
        """Run one plan. Raises PlanError, or StepError when a fault was injected."""
        plan = _Plan(words.tolist(), self)
        fault, self._fault = self._fault, ""
        ticket = Ticket(words, crc32(words.data), None)
        self.written = set()
        if fault == "launch":
            self._lose(plan)
            raise StepError("injected: the launch failed")
        self._move_blocks(plan)
        if fault == "collect":
            for _, host in plan.swap_out:
                self.host[host][:] = bytes(len(self.host[host]))
        self._set_up(plan)
        result = self._forward(plan, fault)
        ticket.result = None if fault == "collect" else result
        self._pending.append(ticket)
        return ticket

    def collect(self, ticket: Ticket) -> StepResult:
        """The result of the oldest launched step."""
        if not self._pending or self._pending.popleft() is not ticket:
            raise PlanError("Steps are not collected in the order of their launch.")
        if crc32(ticket.words.data) != ticket.checksum:
            raise PlanError("The words of a launched plan were changed.")
        if ticket.result is None:
            raise StepError("injected: the result was lost")
        return ticket.result

    def close(self) -> None:
        """Forget the blocks."""
        self.kv, self.host = [], []

    def _lose(self, plan: _Plan) -> None:
        """The step does not run: its rows cannot be used until they are set up again."""
        for row, *_ in plan.rows:
            self.rows[row] = None

    def _move_blocks(self, plan: _Plan) -> None:
        for block, host in plan.swap_out:
            self.host[host][:] = self.kv[block]
            _copy_mark(block in self.tainted, host, self.tainted_host)
        for source, target in plan.copies:
            self.kv[target][:] = self.kv[source]
            _copy_mark(source in self.tainted, target, self.tainted)
        for host, block in plan.swap_in:
            self.kv[block][:] = self.host[host]
            _copy_mark(host in self.tainted_host, block, self.tainted)

    def _set_up(self, plan: _Plan) -> None:
        for params in plan.params:
            self.rows[params[0]] = _Row(self.columns, params)
        for row, until, banned in plan.bans:
            self._row(row).ban_until, self._row(row).banned = until, banned
        for row, column, block in plan.table:
            self._row(row).table[column] = block

    def _row(self, row: int) -> _Row:
        state = self.rows[row]
        if state is None:
            raise PlanError(f"Device row {row} is used before it is set up, or after its step was lost.")
        return state

    def _forward(self, plan: _Plan, fault: str) -> StepResult:
        writer = self._writers(plan)
        tokens: list[int] = []
        bad: list[int] = []
        logprobs: dict[int, TokenLogprobs] = {}
        victim = self._victim % plan.samples if plan.samples and fault else -1
        spoiled = self._victim % max(len(plan.rows), 1) if fault == "bad kv" else -1
        for i, (row, start, length, flags, ids) in enumerate(plan.rows):
            state = self._row(row)
            hit = bool(flags & _SAMPLE) and len(tokens) == victim
            self._check_row(row, state, start, length, flags, writer)
            history, sound = self._compute(state, start, length, ids, i == spoiled, _RUBBISH * (fault == "collect"))
            if not flags & _SAMPLE:
                continue
            banned = state.banned if start + length < state.ban_until else frozenset()
            token = choose(history, state.mark, banned, self.vocab_size)
            state.token, state.length = token, start + length + 1
            self.unsound += not sound and fault != "collect"
            if not sound or (hit and fault == "bad logits"):
                bad.append(len(tokens))
            if flags & _RARE and state.logprobs >= 0:
                logprobs[len(tokens)] = _logprobs(token, start + length)
            tokens.append(self.vocab_size + token if hit and fault == "bad token" else token)
        result = StepResult(np.array(tokens, np.int32), None, logprobs or None)
        if bad:
            result.bad = np.isin(np.arange(len(tokens)), bad)
        return result

    def _writers(self, plan: _Plan) -> dict[int, int]:
        """Block -> the row that writes it in this step."""
        size, writer = self.block_size, dict[int, int]()
        for row, start, length, _, _ in plan.rows:
            table = self._row(row).table
            for block in table[start // size : (start + length - 1) // size + 1]:
                if block and writer.setdefault(block, row) != row:
                    raise PlanError(f"Rows {writer[block]} and {row} write block {block} in one step.")
        self.written = set(writer)
        return writer

    def _check_row(
        self, row: int, state: _Row, start: int, length: int, flags: int, writer: dict[int, int]
    ) -> None:
        end = start + length
        if state.next is not None and start != state.next:
            raise PlanError(f"Row {row} computes position {start} after {state.next - 1}.")
        if not flags & _HOST_IDS and (state.token is None or start != state.length - 1):
            raise PlanError(f"Row {row} decodes position {start}; its last token is at {state.length - 1}.")
        if end > state.length or bool(flags & _SAMPLE) != (end == state.length):
            raise PlanError(f"Row {row} computes up to {end} of {state.length} tokens with flags {flags}.")
        used = state.table[: -(-end // self.block_size)]
        if 0 in used:
            raise PlanError(f"Row {row} reads table column {used.index(0)}, which nobody wrote.")
        if len(writer) > 1 and any(writer.get(block, row) != row for block in used):
            raise PlanError(f"Row {row} reads a block that another row writes in the same step.")
        state.next = end

    def _compute(
        self, state: _Row, start: int, length: int, ids: list[int], poisoned: bool, noise: int
    ) -> tuple[int, bool]:
        """Read the history back, write the words of the new tokens; the history after them, and whether finite."""
        size, table, kv = self.block_size, state.table, self.kv
        full, rest = divmod(start, size)
        history = START
        for block in table[:full]:
            history = crc32(kv[block], history)
        if rest:
            history = crc32(kv[table[full]][: 4 * rest], history)
        sound = not poisoned and not (self.tainted and self._reads_bad(table, start))
        for position in range(start, start + length):
            token = ids[position - start] if ids else state.token
            word, history = history_step(history, token or 0)
            block = table[position // size]
            _WORD.pack_into(kv[block], 4 * (position % size), word ^ noise if sound else BAD)
            if not sound:
                self.tainted.add(block)
        if self.tainted and sound:
            for block in table[full : (start + length - 1) // size + 1]:
                if block in self.tainted and BAD not in memoryview(kv[block]).cast("I"):
                    self.tainted.discard(block)
        return history, sound

    def _reads_bad(self, table: list[int], end: int) -> bool:
        """Whether any of positions 0..end - 1 holds a BAD word."""
        size = self.block_size
        for column in range(-(-end // size)):
            block = table[column]
            if block in self.tainted and BAD in memoryview(self.kv[block]).cast("I")[: end - column * size]:
                return True
        return False


def _copy_mark(marked: bool, target: int, marks: set[int]) -> None:
    if marked:
        marks.add(target)
    else:
        marks.discard(target)


def _logprobs(token: int, position: int) -> TokenLogprobs:
    """Made so that a test can tell which token and position they belong to."""
    return TokenLogprobs(-1.0 - token, position, np.array([token], np.int32), np.array([-1.0 - token], np.float32))


class _Plan:
    """A plan taken apart and checked for what needs no device state."""

    def __init__(self, words: list[int], runner: FakeRunner) -> None:
        if len(words) < _HEADER or words[:2] != [_MAGIC, _VERSION] or words[7] != len(words):
            raise PlanError("A plan has a wrong header.")
        sections: list[list[int]] = []
        for s, width in enumerate(_WIDTHS):
            offset, count = words[8 + 2 * s : 10 + 2 * s]
            if offset < _HEADER or count < 0 or offset + count * width > len(words):
                raise PlanError(f"Section {s} of a plan is out of bounds.")
            sections.append(words[offset : offset + count * width])
        if sum(map(len, sections)) + _HEADER != len(words):
            raise PlanError("The sections of a plan do not fill it.")
        self.table, self.copies, self.swap_out, self.swap_in, self.params = (
            [tuple(section[i : i + width]) for i in range(0, len(section), width)]
            for section, width in zip(sections[1:6], _WIDTHS[1:6], strict=True)
        )
        self.bans = _bans(sections[6], len(runner.rows))
        self._take_rows(words, sections[0], sections[7], runner)
        self._check_blocks(runner)

    def _take_rows(self, words: list[int], columns: list[int], tokens: list[int], runner: FakeRunner) -> None:
        """`rows`: device row, start, length, flags, ids (empty for rows that feed themselves)."""
        count, total, decode_rows, longest = words[3:7]
        if len(columns) != 4 * count or not 0 <= decode_rows <= count:
            raise PlanError("The rows of a plan do not match its header.")
        self.rows: list[tuple[int, int, int, int, list[int]]] = []
        self.samples = 0
        at = 0
        for i in range(count):
            row, start, length, flags = columns[i::count]
            fed = bool(flags & _HOST_IDS)
            ids = tokens[at : at + length] if fed else []
            at += length if fed else 0
            inside = 0 <= start and 1 <= length <= runner.columns * runner.block_size - start
            if not inside or fed == (i < decode_rows) or (length != 1 and not fed):
                raise PlanError(f"Row {row} has {length} tokens from {start} with flags {flags} at place {i}.")
            self.samples += flags & _SAMPLE
            self.rows.append((row, start, length, flags, ids))
        lengths = [row[2] for row in self.rows]
        if at != len(tokens) or sum(lengths) != total or max(lengths, default=0) != longest:
            raise PlanError("The tokens of a plan do not match its header.")
        named = [row[0] for row in self.rows]
        set_up = [params[0] for params in self.params]
        for rows in (named, set_up):
            if len(set(rows)) != len(rows) or not all(0 < row < len(runner.rows) for row in rows):
                raise PlanError(f"Device rows {rows} of a plan.")
        if tokens and not 0 <= min(tokens) <= max(tokens) < runner.vocab_size:
            raise PlanError("A plan feeds a token outside the vocabulary.")

    def _check_blocks(self, runner: FakeRunner) -> None:
        """No block 0, nothing out of range, no destination read or written twice."""
        device, host = len(runner.kv), len(runner.host)
        places = [(row, column) for row, column, _ in self.table]
        if len(set(places)) != len(places):
            raise PlanError("A plan writes a table entry twice.")
        if not all(0 < row < len(runner.rows) and 0 <= column < runner.columns for row, column in places):
            raise PlanError("A plan writes outside the block table.")
        read = [source for source, _ in self.copies] + [block for block, _ in self.swap_out]
        written = [target for _, target in self.copies] + [block for _, block in self.swap_in]
        blocks = [block for *_, block in self.table] + read + written
        if not all(0 < block < device for block in blocks):
            raise PlanError("A plan names block 0, or one that does not exist.")
        if len(set(written)) != len(written) or set(written) & set(read):
            raise PlanError("A block is a destination twice, or destination and source, in one plan.")
        host_read, host_written = [h for h, _ in self.swap_in], [h for _, h in self.swap_out]
        if not all(0 <= block < host for block in host_read + host_written):
            raise PlanError("A plan names a host block that does not exist.")
        if len({*host_read, *host_written}) != len(host_read) + len(host_written):
            raise PlanError("A host block is used twice in one plan.")


def _bans(words: list[int], rows: int) -> list[tuple[int, int, frozenset[int]]]:
    """EXTRAS: (device row, position until which, ids)."""
    out, at = [], 0
    while at < len(words):
        row, kind, count, *_ = *words[at : at + 3], 0, -1, -1
        payload = words[at + 3 : at + 3 + count]
        if kind not in _EXTRAS or count < 1 or len(payload) != count or not 0 < row < rows:
            raise PlanError("A plan has extras of an unknown kind or length.")
        if kind == _BAN_UNTIL:
            out.append((row, payload[0], frozenset(payload[1:])))
        at += 3 + count
    return out
