"""From a checkpoint to a running CUDA engine: weights to the card, one largest step, KV pool, graphs; and how long.

The pool is sized after the largest step has really run, so workspaces, loaded kernels and other processes are counted
and nothing is guessed but the memory of the graphs, which is bounded by arithmetic. What cannot fit is refused with
what it needs, what there is, and what would help, the most effective first.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from octavo.config import EngineConfig, Facts, ModelFacts
from octavo.errors import ConfigError
from octavo.kernels.quant import Weight
from octavo.model.decoder import Decoder
from octavo.model.spec import ModelSpec
from octavo.runner.build import PLAIN, kept, online, products, quantised_weight, torch_dtype
from octavo.runner.card import Books
from octavo.runner.cuda_runner import CudaRunner
from octavo.runner.kv_scales import KvScales
from octavo.runner.memory import CardMemory, gib, graph_bytes, memory_share, weight_bytes
from octavo.weights.checkpoint import Array, Checkpoint, to_float32
from octavo.weights.load import DummyCheckpoint, load
from octavo.weights.needs import TensorNeed

_log = logging.getLogger(__name__)

_STAGING = 64 << 20  # bytes of each of the two pinned buffers that weights pass through


@dataclass(slots=True)
class Timeline:
    """Seconds of each part of the start, in order, beginning with the process itself."""

    parts: dict[str, float] = field(default_factory=dict)
    _last: float = field(default_factory=lambda: time.monotonic() - process_age())

    def mark(self, part: str) -> None:
        """Everything since the mark before belongs to `part`."""
        now = time.monotonic()
        self.parts[part] = self.parts.get(part, 0.0) + now - self._last
        self._last = now

    def line(self) -> str:
        """All parts and their sum."""
        parts = ", ".join(f"{name} {seconds:.2f}" for name, seconds in self.parts.items())
        return f"start: {sum(self.parts.values()):.2f} s ({parts})"


def process_age() -> float:
    """Seconds since this process was started; 0 where the system does not tell."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0


class _Uploader:
    """Arrays to the device through two pinned buffers, so that reading and copying overlap."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers = [torch.empty(_STAGING, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._events = [torch.cuda.Event() for _ in range(2)]
        self._turn = 0

    def upload(self, array: Array, dtype: torch.dtype) -> Tensor:
        """A tensor with the bytes of `array`, read as `dtype`."""
        out = torch.empty(array.shape, dtype=dtype, device=self._device)
        target = out.view(-1).view(torch.uint8)
        source = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        for at in range(0, len(source), _STAGING):
            piece = source[at : at + _STAGING]
            buffer, event = self._buffers[self._turn], self._events[self._turn]
            event.synchronize()
            np.copyto(buffer.numpy()[: len(piece)], piece)
            target[at : at + len(piece)].copy_(buffer[: len(piece)], non_blocking=True)
            event.record()
            self._turn = 1 - self._turn
        return out


def load_params(
    needs: Sequence[TensorNeed],
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    quantization: str = "",
) -> dict[str, Weight]:
    """`octavo.runner.build.load_params`, faster for a CUDA device; dummy weights are made there."""
    if isinstance(checkpoint, DummyCheckpoint):
        return dummy_params(needs, dtype, device, quantization)
    uploader = _Uploader(device)
    params: dict[str, Weight] = {}
    for need, item in zip(needs, load(needs, checkpoint, quantised=products(needs)), strict=True):
        if item.parts:
            params[item.name] = quantised_weight(item, dtype, uploader.upload)
            continue
        stored = PLAIN.get(item.dtype, torch.float32)
        array = item.array if item.dtype in PLAIN else to_float32(item.array, item.dtype)
        params[item.name] = online(need, uploader.upload(array, stored).to(kept(need, dtype)), quantization)
    return params


def dummy_params(
    needs: Sequence[TensorNeed], dtype: torch.dtype, device: torch.device, quantization: str = ""
) -> dict[str, Weight]:
    """Filler as `DummyCheckpoint` describes it, made on the device: other values, the same distribution."""
    generator = torch.Generator(device).manual_seed(0)
    params: dict[str, Weight] = {}
    for need in needs:
        tensor = torch.empty(need.shape, dtype=kept(need, dtype), device=device)
        if len(need.shape) == 1 and ("norm" in need.name or "rope" in need.name):
            params[need.name] = tensor.fill_(1.0)
        else:
            bound = math.sqrt(3.0 / need.shape[-1])
            params[need.name] = online(need, tensor.uniform_(-bound, bound, generator=generator), quantization)
    return params


def load_kernels(runner: CudaRunner) -> None:
    """All kernels, compiled if need be. Raises ConfigError where Triton cannot make them."""
    try:
        runner.load_kernels()
    except RuntimeError as error:
        if "C compiler" not in str(error):
            raise
        fix = "Install one (apt install gcc libc6-dev), or take --device cpu."
        raise ConfigError("Triton needs a C compiler to launch kernels, and finds none.", fix) from error


def build_cuda(
    config: EngineConfig,
    spec: ModelSpec,
    needs: Sequence[TensorNeed],
    checkpoint: Checkpoint,
    model: ModelFacts,
    quantization: str = "",
    kv: KvScales | None = None,
) -> tuple[CudaRunner, Facts]:
    """A runner that is ready to serve, and the numbers it runs with. Raises ConfigError for what cannot fit.

    `quantization`: see `load_params`. `kv`: where the scales of a KV cache in FP8 come from; None for a plain one.
    """
    timeline = Timeline()
    timeline.mark("process and imports")
    device, dtype = torch.device("cuda", torch.cuda.current_device()), torch_dtype(model.dtype)
    free, total = torch.cuda.mem_get_info(device)
    books = Books(device)
    weights = sum(weight_bytes(needs, model.dtype, stored=checkpoint, quantization=quantization).values())
    memory = CardMemory(config, total, min(free, int(total * memory_share(config))), weights)
    timeline.mark("device")
    wish = memory.resolve(model, memory.budget - weights, f"{gib(weights)} of weights")  # refuse before loading
    params = load_params(needs, checkpoint, dtype, device, quantization)
    books.parts["weights"] = sum(weight.nbytes for weight in params.values())
    decoder = Decoder(spec, params, fp8_kv=kv is not None)
    if kv is not None:
        kv.give(decoder)
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()  # what quantising and repacking needed for a moment, which is no part of a step
    timeline.mark("weights")
    runner = CudaRunner(
        decoder, blocks=1, block_size=wish.block_size, rows=wish.max_num_seqs, max_len=wish.max_model_len,
        max_tokens=wish.max_num_batched_tokens, eager=config.model.enforce_eager, swap_blocks=wish.swap_blocks,
    )  # fmt: skip
    load_kernels(runner)
    timeline.mark("kernels")
    runner.try_largest()
    books.note("kernels and libraries")
    timeline.mark("largest step")
    used = free - torch.cuda.mem_get_info(device)[0]
    graphs = 0 if config.model.enforce_eager else graph_bytes(spec, model.dtype, wish.max_num_seqs)
    what = f"{gib(weights)} of weights and {gib(used - weights + graphs)} to run steps"
    facts = memory.resolve(model, memory.budget - used - graphs, what)
    runner.set_pool(facts.blocks)
    timeline.mark("KV cache")
    if not config.model.enforce_eager:
        runner.capture()
        books.note("captured graphs")
    timeline.mark("graphs")
    runner.timeline, runner.memory = timeline.parts, books.parts
    _log.info("%s", timeline.line())
    return runner, facts
