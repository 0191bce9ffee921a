"""CudaRunner: plans executed by captured graphs on one CUDA device.

A step is one copy of the plan's words to the device, a part B (writes of the plan, all layers, the stream of the
rows that sample), a part S (last norm, head, tokens), one copy of the tokens back, and an event. Steps in which every
row has one token are one captured graph of both per number of rows, whether rows feed themselves or the host does. Of
mixed steps, B is captured per number of tokens and S per number of samples; a step larger than the largest of them is
launched kernel by kernel. A step with a rare row runs the torch sampler instead of S. Copies and swaps of blocks come
before, kernel by kernel.

The host buffers rotate: one is written again only when the step that used it is done. Nothing else is shared with
the device, and all device work is on one stream, in the order of the plans.

Shape letters: T tokens of a step, R rows, N samples, I hidden features, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.attention.base import KVPool
from octavo.attention.triton import Sizes, TritonAttention, TritonPlan, cut_for, partials_for
from octavo.errors import ConfigError, EngineError, invariant
from octavo.kernels.gpu.decode import kernel_of
from octavo.kernels.gpu.rope import Turning
from octavo.kernels.gpu.sample import sample as sample_on_device
from octavo.kernels.gpu.step import RUN_WORDS, Cut, StepTables, begin
from octavo.kernels.gpu.together import ready_together
from octavo.layers.attention import HeadNorm
from octavo.model.decoder import Decoder
from octavo.runner.base import StepError, StepResult, TokenLogprobs
from octavo.runner.cuda_rows import CudaRows
from octavo.runner.edits import prompt_chunks
from octavo.runner.graphs import Graphs
from octavo.runner.host_blocks import HostBlocks
from octavo.runner.step import prompt_logprobs, sample, sampled_rows
from octavo.scheduler.plan import (
    HEADER_WORDS,
    PARAM_WORDS,
    RARE,
    SAMPLE,
    SECTIONS,
    PlanDraft,
    PlanView,
    swap_capacity,
    table_capacity,
)

HOST_BUFFERS = 4  # steps whose host buffers may be in use
PREFIX_ROWS = 8  # decode rows from which a shared prefix is read once ...
PREFIX_KEYS = 65536  # ... when that spares reading at least so many keys

_Graph = tuple[Hashable, Callable[[], object]]  # the key of a graph and what it is captured from


def decode_sizes(rows: int) -> list[int]:
    """Numbers of decode rows (and of samples) that have a graph, up to `rows`."""
    sizes = [1, 2, 4, *range(8, 257, 8), *range(288, 513, 32), *range(576, 4097, 64)]
    return [size for size in sizes if size < rows] + [rows]


def sample_sizes(rows: int) -> list[int]:
    """Numbers of samples of mixed steps that have a graph: the head reads its weight once for any of them."""
    return [1 << power for power in range(rows.bit_length()) if 1 << power < rows] + [rows]


def prefix_sizes(rows: int) -> list[int]:
    """Numbers of decode rows of steps with a shared prefix that have a graph: captured while serving, so fewer."""
    sizes = sorted(size for power in range(3, 12) for size in (1 << power, 3 << power - 1))
    return [size for size in sizes if size < rows] + [rows]


def token_sizes(tokens: int) -> list[int]:
    """Numbers of tokens of a mixed step that have a graph; larger steps keep the device busy by themselves."""
    sizes = [16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 640, 768, 1024, 1280, 1536, 2048]
    return [size for size in sizes if size <= tokens]


class _HostBuffer:
    """One rotating pair: words to the device, tokens from it, and the event after which both are free again."""

    def __init__(self, words: int, samples: int, device: torch.device) -> None:
        pin = device.type == "cuda"
        self.words = torch.zeros(words, dtype=torch.int32, pin_memory=pin)
        self.tokens = torch.zeros(samples, dtype=torch.int32, pin_memory=pin)
        self.words_view: NDArray[np.int32] = self.words.numpy()
        self.tokens_view: NDArray[np.int32] = self.tokens.numpy()
        self.event = torch.cuda.Event() if pin else None
        self.busy = False
        self._pieces: dict[tuple[bool, int], tuple[Tensor, Tensor]] = {}  # slicing costs as much as copying

    def send(self, device_words: Tensor, count: int) -> None:
        """The first `count` words to the device, and perhaps some that mean nothing."""
        there, here = self._first(device_words, self.words, count)
        there.copy_(here, non_blocking=True)

    def fetch(self, device_tokens: Tensor, count: int) -> None:
        """The first `count` tokens from the device, and perhaps some that mean nothing."""
        there, here = self._first(device_tokens, self.tokens, count)
        here.copy_(there, non_blocking=True)

    def _first(self, there: Tensor, here: Tensor, count: int) -> tuple[Tensor, Tensor]:
        count = min(-(-count // 64) * 64, len(here))
        key = here is self.words, count
        pieces = self._pieces.get(key)
        if pieces is None:
            pieces = self._pieces[key] = there[:count], here[:count]
        return pieces

    def wait(self) -> None:
        """Until the step that used it is done."""
        if self.busy and self.event is not None:
            self.event.synchronize()
        self.busy = False


@dataclass(slots=True)
class Ticket:
    """A launched step: where its tokens arrive, how many, and what the torch sampler found."""

    buffer: _HostBuffer
    samples: int
    result: StepResult | None = None
    prompts: dict[int, tuple[int, list[TokenLogprobs]]] | None = None


def _decoding(view: PlanView) -> int:
    """Rows whose attention is that of decoding, as the step kernels have it: all, when no row has two tokens."""
    rows: int = view.rows if view.longest == 1 else view.decode_rows
    return rows


class CudaRunner:
    """Runs `decoder` with `rows` sequences of up to `max_len` tokens, `max_tokens` a step; see `Runner`.

    `blocks` KV blocks, the padding block included; `set_pool` may change their number as long as no graph exists.
    `swap_blocks` blocks of pinned host memory take what plans swap out. `eager`: no graphs. The
    decoder's backends must be `TritonAttention`.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        blocks: int,
        block_size: int,
        rows: int,
        max_len: int,
        max_tokens: int,
        eager: bool,
        swap_blocks: int = 0,
    ) -> None:
        device = decoder.device
        self._backends: dict[int, TritonAttention] = {}  # by window
        for window, backend in decoder.backends.items():
            if not isinstance(backend, TritonAttention):
                raise ConfigError("The CUDA runner needs the Triton backend.", "Leave the choice to Octavo.")
            self._backends[window] = backend
        self._windows = [layer.window for layer in decoder.spec.layers]
        self._shape = self._backends[self._windows[0]].shape
        self.decoder, self.block_size, self.device = decoder, block_size, device
        self.swap_blocks = swap_blocks
        columns = -(-max_len // block_size)
        self.rows = CudaRows(rows + 1, columns, device)
        self.max_rows, self.max_tokens = rows, max_tokens
        self._decode_sizes = decode_sizes(min(rows, max_tokens))
        self._prefix_sizes = prefix_sizes(min(rows, max_tokens))
        self._sample_sizes = sample_sizes(min(rows, max_tokens))
        self._token_sizes = token_sizes(max_tokens)
        on_cuda = device.type == "cuda"
        self._processors = torch.cuda.get_device_properties(device).multi_processor_count if on_cuda else 1
        items = max(self._cut(lanes).workers + lanes for lanes in range(1, rows + 1))
        self._tile = self._cut(1).tile
        tiles = max_tokens // self._tile + rows + 1
        self.step = StepTables(rows, max_tokens, items, tiles, self._shape.kv_heads, device)
        self._partials = partials_for(self._shape, items, rows, device)
        self._ropes = {window: decoder.rope_table(max_len, window) for window in self._backends}
        self._picked_RI = torch.zeros((rows, decoder.spec.hidden_size), dtype=decoder.dtype, device=device)
        self._out_R = torch.zeros(rows, dtype=torch.int32, device=device)
        words = HEADER_WORDS + rows * (4 + PARAM_WORDS + 4) + 3 * table_capacity(rows, columns)
        words += max_tokens + (4 * swap_capacity(columns) if swap_blocks else 0) + 4096
        self._words = torch.zeros(RUN_WORDS.value + words, dtype=torch.int32, device=device)
        self._buffers = [_HostBuffer(len(self._words), rows, device) for _ in range(HOST_BUFFERS)]
        self._turn = 0
        self._flags, self._samples, self._rare = b"", 0, False  # of the last step, and what follows from them
        self.timeline: dict[str, float] = {}  # seconds of each part of the start
        self.memory: dict[str, int] = {}  # bytes by what the start has taken them for; see `octavo.runner.card`
        self.graphs = Graphs(device, not eager)
        self._ready = False  # every kernel is loaded
        self.set_pool(blocks)
        self.host = HostBlocks(swap_blocks, self.pool.bits)

    def set_pool(self, blocks: int) -> None:
        """Allocate a KV pool of `blocks` blocks in place of the one there is."""
        invariant(not len(self.graphs), "graphs hold the old pool")
        self.__dict__.pop("pool", None)  # the new one may need its memory
        self.pool: KVPool = self.decoder.make_pool(blocks, self.block_size)

    @torch.inference_mode()
    def load_kernels(self) -> None:
        """Compile, or find on disk, every kernel that a step can launch, and load it."""
        if self._ready or self.device.type != "cuda":
            return
        ready_together(self._rehearse, self.device)
        self._ready = True

    def _rehearse(self) -> None:
        """What steps of all sizes launch, for a plan of nothing and one layer of each kind."""
        self._send_nothing()
        layers = self.decoder.unlike
        largest = self.max_tokens // self._tile + self.max_rows
        prefixes = (False,) if any(self._windows) else (False, True)
        unlike = {kernel_of(lanes, self._cut(lanes)): lanes for lanes in range(1, self._decode_sizes[-1] + 1)}
        for lanes in unlike.values():
            for prefix in prefixes:
                sizes = Sizes(self.max_tokens, lanes, self._cut(lanes), largest, prefix)
                self.run_body(sizes, layers=layers)
        for size in self._decode_sizes:
            self.run_body(self._decode_launch(size, False), layers=layers)
        for size in self._prefix_sizes if len(prefixes) > 1 else ():
            self.run_body(self._decode_launch(size, True), layers=layers)
        for size in self._token_sizes:
            for prefix in prefixes:
                self.run_body(self.mixed_launch(size, prefix), layers=layers)
        for size in {*self._sample_sizes, *self._decode_sizes}:
            for filters in (False, True):
                self.run_sample(self._picked_RI[:size], filters)

    def _send_nothing(self) -> None:
        none = np.zeros(0, np.int64)
        self._send(PlanDraft(0).encode((none, none, none, none), 0), 0, self._buffers[0])

    @torch.inference_mode()
    def try_largest(self) -> None:
        """Run the largest step there can be, in the padding block: the most memory that anything will need."""
        self.load_kernels()
        length = min(self.max_tokens, self.rows.tables_SM.shape[1] * self.block_size)
        rows = min(self.max_rows, -(-self.max_tokens // length))
        draft = PlanDraft(0, tokens=[np.zeros(rows * length, np.int32)[: self.max_tokens]])
        lengths = np.full(rows, length, np.int64)
        lengths[-1] = self.max_tokens - length * (rows - 1) if rows * length > self.max_tokens else length
        zeros = np.zeros(rows, np.int64)
        self._send(draft.encode((zeros, zeros, lengths, zeros + SAMPLE), 0), 0, self._buffers[0])
        tiles = int((-(-lengths // self._tile)).sum())
        prefix = not any(self._windows)
        self.run_body(Sizes(int(lengths.sum()), rows, self._cut(rows), tiles, prefix))
        self.run_sample(self._picked_RI[: self._decode_sizes[-1]], True)

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture what plain sampling needs; graphs for filters and shared prefixes are captured when first used."""
        self.load_kernels()
        for size in reversed(self._sample_sizes):
            self.graphs.capture(*self._sample_graph(size, False))
        for size in reversed(self._decode_sizes):
            self.graphs.capture(*self._decode_graph(size, False, False))
        for size in reversed(self._token_sizes):
            self.graphs.capture(*self._mixed_graph(size, False))

    def launch(self, words: NDArray[np.int32]) -> Ticket:
        """Start one plan; see `octavo.runner.base.Runner`."""
        try:
            with torch.inference_mode():
                return self._launch(PlanView(words))
        except torch.OutOfMemoryError as error:
            raise StepError(f"The device has no memory left for a step of {words[4]} tokens: {error}") from error
        except torch.AcceleratorError as error:
            raise EngineError(f"The CUDA device failed: {error}", "Restart; see the driver's log.") from error

    def collect(self, ticket: Ticket) -> StepResult:
        """Wait for a launched step; see `octavo.runner.base.Runner`."""
        try:
            ticket.buffer.wait()
        except torch.AcceleratorError as error:
            raise EngineError(f"The CUDA device failed: {error}", "Restart; see the driver's log.") from error
        tokens = ticket.buffer.tokens_view[: ticket.samples].copy()
        result = ticket.result
        if result is None:
            result, bad = StepResult(tokens), tokens < 0
            if bad.any():
                result.bad, tokens[bad] = bad, 0
        result.tokens, result.prompts = tokens, ticket.prompts
        return result

    def close(self) -> None:
        """Free graphs, pool and host buffers."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.graphs.clear()
        del self.pool, self.host

    def _launch(self, view: PlanView) -> Ticket:
        buffer = self._buffers[self._turn]
        self._turn = (self._turn + 1) % len(self._buffers)
        buffer.wait()
        self.rows.note(view)
        prefix = self._shared_prefix(view)
        self._send(view.words, prefix, buffer)
        if len(view.copies) or len(view.swap_out) or len(view.swap_in):
            self._move_blocks(view)
        rows, flags = view.rows, view.flags.tobytes()
        if flags != self._flags:
            self._flags, self._samples = flags, int(np.count_nonzero(view.flags & SAMPLE))
            self._rare = bool(np.count_nonzero(view.flags & RARE))
        samples, rare = self._samples, self._rare
        ticket = Ticket(buffer, samples)
        if rows and samples == _decoding(view) == rows and not rare:
            filters = self.rows.any_filters(view.device_rows)
            self.graphs.run(*self._decode_graph(self._decode_size(rows, prefix > 0, filters), prefix > 0, filters))
        else:
            self._mixed_step(view, prefix, samples, rare, ticket)
        if samples:
            buffer.fetch(self._out_R, samples)
        if buffer.event is not None:
            buffer.event.record()
            buffer.busy = True
        return ticket

    def _mixed_step(self, view: PlanView, prefix: int, samples: int, rare: bool, ticket: Ticket) -> None:
        """Parts B and S of a step that is not plain decoding."""
        if len(view.extras) and prompt_chunks(view):
            stream_TI = self._run_exact(view, prefix)
            ticket.prompts = prompt_logprobs(view, self.decoder.normed(stream_TI), self.decoder.logits)
        else:
            self._body(view, prefix)
        if samples and rare:
            ticket.result = self._rare_sample(view, samples)
        elif samples:
            filters = self.rows.any_filters(view.device_rows[(view.flags & SAMPLE) != 0])
            size = next(size for size in self._sample_sizes if size >= samples)
            self.graphs.run(*self._sample_graph(size, filters))

    def _send(self, words: NDArray[np.int32], prefix: int, buffer: _HostBuffer) -> None:
        """The runner's words, then the plan's but for EXTRAS, which no kernel reads, in one copy."""
        head, at = RUN_WORDS.value, 8 + 2 * SECTIONS.index("extras")
        if words[at + 1]:
            extras, count = int(words[at]), int(words[at + 1])
            words = np.delete(words, slice(extras, extras + count))
            words[at + 2] -= count  # TOKENS, the section after it
        end = head + len(words)
        if end > len(self._words):
            raise StepError(f"A plan of {len(words)} words; there is room for {len(self._words) - head}.")
        buffer.words_view[0] = prefix
        buffer.words_view[head:end] = words
        buffer.send(self._words, end)

    def _move_blocks(self, view: PlanView) -> None:
        """Swap-out, copies, swap-in, in this order, before anything is written."""
        if len(view.swap_out):
            self.host.take(self.pool.bits, self._on_device(view, "swap_out")[:, 0], view.swap_out[:, 1])
        if len(view.copies):
            pairs = self._on_device(view, "copies")
            self.pool.copy_blocks(pairs[:, 0], pairs[:, 1])
        if len(view.swap_in):
            self.host.give(self.pool.bits, view.swap_in[:, 0], self._on_device(view, "swap_in")[:, 1])

    def _on_device(self, view: PlanView, section: str) -> Tensor:
        """A section of pairs, which came with the plan's words."""
        at = 8 + 2 * SECTIONS.index(section)
        first, count = RUN_WORDS.value + int(view.words[at]), int(view.words[at + 1])
        return self._words[first : first + 2 * count].view(-1, 2).to(torch.int64)

    def _shared_prefix(self, view: PlanView) -> int:
        """Keys that all decode rows share, when reading them once pays; else 0."""
        rows = _decoding(view)
        if rows < PREFIX_ROWS or any(self._windows):
            return 0
        keys = self.rows.shared_columns(view, rows, self.block_size) * self.block_size
        return keys if keys * (rows - 1) >= PREFIX_KEYS else 0

    def _cut(self, lanes: int) -> Cut:
        fp8 = self.decoder.kv_scales_L2K is not None
        return cut_for(self._shape, self.decoder.dtype, lanes, self._processors, fp8)

    def _body(self, view: PlanView, prefix: int) -> None:
        """Graph B, or its kernels one by one."""
        rows, tokens, decodes = view.rows, view.total_tokens, _decoding(view)
        if not rows:  # writes only
            begin(
                self._words, self.step, self.rows.tables_SM, self.rows.params_SP, self.rows.last_token_S,
                self._cut(1), self.block_size, 1, 1,
            )  # fmt: skip
            return
        if decodes == rows:  # with a rare row: the graphs of plain steps sample, too
            size = self._decode_size(rows, prefix > 0, False)
            self.graphs.run(("body", size, prefix > 0), lambda: self.run_body(self._decode_launch(size, prefix > 0)))
            return
        chunks = view.length[decodes:]
        tiles = int((-(-chunks // self._tile)).sum())
        size = next((size for size in self._token_sizes if size >= tokens), 0)
        sizes = self.mixed_launch(size, prefix > 0)
        if size and tiles <= sizes.tiles:
            self.graphs.run(*self._mixed_graph(size, prefix > 0))
        else:
            self._run_exact(view, prefix)

    def _run_exact(self, view: PlanView, prefix: int) -> Tensor:
        """Graph B's kernels one by one, for exactly this plan; the stream of all its tokens."""
        decodes = _decoding(view)
        tiles = int((-(-view.length[decodes:] // self._tile)).sum())
        cut = self._cut(view.rows) if decodes else None
        return self.run_body(Sizes(view.total_tokens, view.rows, cut, tiles, prefix > 0))

    def _decode_size(self, rows: int, prefix: bool, filters: bool) -> int:
        """The graph size that serves `rows` rows; with a prefix rather a larger one than one yet to be made."""
        if not prefix:
            return next(size for size in self._decode_sizes if size >= rows)
        fitting = [size for size in self._prefix_sizes if size >= rows]
        made = (size for size in fitting if size <= 4 * rows and ("decode", size, True, filters) in self.graphs)
        return next(made, fitting[0])

    def _decode_launch(self, size: int, prefix: bool) -> Sizes:
        return Sizes(size, size, self._cut(size), 0, prefix)

    def _decode_graph(self, size: int, prefix: bool, filters: bool) -> _Graph:
        """B and S of `size` decode rows, all of which sample: token i of the step is sample i."""

        def both() -> None:
            self.run_sample(self.run_body(self._decode_launch(size, prefix), pick=False), filters)

        return ("decode", size, prefix, filters), both

    def _mixed_graph(self, size: int, prefix: bool) -> _Graph:
        return ("mixed", size, prefix), lambda: self.run_body(self.mixed_launch(size, prefix))

    def _sample_graph(self, size: int, filters: bool) -> _Graph:
        return ("sample", size, filters), lambda: self.run_sample(self._picked_RI[:size], filters)

    def mixed_launch(self, size: int, prefix: bool) -> Sizes:
        """What graph B of a mixed step of `size` tokens is launched for: all rows may decode, or be short chunks."""
        lanes = min(size, self.max_rows)
        return Sizes(size, lanes, self._cut(lanes), size // self._tile + min(lanes, 64), prefix)

    def run_body(self, sizes: Sizes, pick: bool = True, layers: list[int] | None = None) -> Tensor:
        """Everything from the plan's words on the device to the stream of all tokens, which it returns.

        `pick`: leave the stream of the last tokens of rows that sample where S looks for it. `layers`: only these.
        """
        step, rows = self.step, self.rows
        begin(
            self._words, step, rows.tables_SM, rows.params_SP, rows.last_token_S, sizes.cut or self._cut(1),
            self.block_size, sizes.lanes, sizes.tokens,
        )  # fmt: skip
        plan = TritonPlan(sizes, step, rows.tables_SM, step.slots_T[: sizes.tokens], self._partials)

        def mix(layer: int, qkv_TJD: Tensor, norm: HeadNorm | None) -> Tensor:
            window = self._windows[layer]
            turning = Turning(norm, self._ropes[window])
            return self._backends[window].run_qkv(layer, qkv_TJD, turning, self.pool, plan)

        stream_TI = self.decoder.forward_with(step.ids_T[: sizes.tokens], mix, layers)
        if pick:
            last_R = step.samples_3R[0, : sizes.lanes]
            torch.index_select(stream_TI, 0, last_R, out=self._picked_RI[: sizes.lanes])
        return stream_TI

    def run_sample(self, stream_NI: Tensor, filters: bool) -> None:
        """Head and sampling of samples whose stream is `stream_NI`; there may be fewer than it has rows."""
        spec, rows = self.decoder.spec, self.rows
        logits_NV = self.decoder.raw_logits(self.decoder.normed(stream_NI))
        sample_on_device(
            logits_NV, self.step, rows.params_SP, rows.last_token_S, self._out_R, spec.logit_scale,
            spec.logit_softcap, filters,
        )  # fmt: skip

    def _rare_sample(self, view: PlanView, samples: int) -> StepResult:
        """The torch sampler, for steps with a row that S cannot serve."""
        logits_NV = self.decoder.logits(self.decoder.normed(self._picked_RI[:samples]))
        tokens_N, result = sample(logits_NV, view, sampled_rows(view), self.rows)
        self._out_R[:samples] = tokens_N.to(torch.int32)
        return result
