"""The native runner under a real scheduler, driven by hand; and the embedded model in it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("octavo.kernels.native._native", reason="the native module is not built")

from octavo.engine.client import ModelLimits
from octavo.engine.loop import EngineLoop
from octavo.model.gguf_keys import spec_from_gguf
from octavo.model.spec import ModelSpec, weight_needs
from octavo.runner.native import NativeRunner, build_native
from octavo.scheduler.records import Limits
from octavo.scheduler.scheduler import Scheduler
from octavo.weights.checkpoint import Array, TensorInfo, to_float32
from octavo.weights.gguf import GgufCheckpoint
from tests.engine.tiny import TinyEngine

ROWS, MAX_LEN = 64, 1024


class RoundedCheckpoint:
    """Another checkpoint, dequantised and rounded to bfloat16: what the references were made from."""

    def __init__(self, inner: GgufCheckpoint) -> None:
        self._inner = inner

    def names(self) -> list[str]:
        return self._inner.names()

    def info(self, name: str) -> TensorInfo:
        inner = self._inner.info(name)
        return TensorInfo(name, "BF16", inner.shape, 2 * int(np.prod(inner.shape)), inner.file)

    def read(self, name: str) -> Array:
        bits = to_float32(self._inner.read(name), self._inner.info(name).dtype).view(np.uint32)
        return (bits + 0x7FFF + (bits >> 16 & 1) >> 16).astype(np.uint16)


def load_smollm2(
    path: Path,
    *,
    rounded: bool = False,
    block_size: int = 16,
    blocks: int = 1001,
    dtype: str = "bfloat16",
    kv: str = "",
) -> tuple[ModelSpec, NativeRunner]:
    checkpoint = GgufCheckpoint(path)
    spec = spec_from_gguf(checkpoint.metadata, checkpoint.names())
    source = RoundedCheckpoint(checkpoint) if rounded else checkpoint
    runner = build_native(
        spec,
        weight_needs(spec, "gguf"),
        source,
        blocks=blocks,
        block_size=block_size,
        rows=ROWS,
        max_len=MAX_LEN,
        dtype=dtype,
        kv=kv,
    )
    return spec, runner


class NativeEngine(TinyEngine):
    """A hand-driven engine on the weights and KV pool of a loaded runner; what the pool held before stays there."""

    def __init__(
        self,
        spec: ModelSpec,
        loaded: NativeRunner,
        *,
        blocks: int = 1000,
        block_size: int = 16,
        budget: int = 512,
        seqs: int = ROWS,
        max_len: int = MAX_LEN,
        depth: int = 0,
        cache: bool = True,
        swap_blocks: int = 0,
    ) -> None:
        assert blocks + swap_blocks < loaded.blocks
        self.limits = ModelLimits(spec.vocab_size, max_len, block_size, spec.eos_ids, cache)
        self.runner = NativeRunner(
            loaded.engine,
            blocks=blocks + 1,
            block_size=block_size,
            rows=seqs,
            max_len=max_len,
            swap_blocks=swap_blocks,
        )
        limits = Limits(
            seqs, budget, max_len, block_size, blocks + 1, spec.vocab_size, cache, swap_blocks=swap_blocks
        )
        self.scheduler = Scheduler(limits)
        self.loop = EngineLoop(self.scheduler, self.runner, depth)
        self.tokens, self.logprobs, self.reasons, self.best = {}, {}, {}, {}


def log_probabilities(runner: NativeRunner, ids: list[int], block_size: int = 16) -> np.ndarray:
    """Log-probabilities [len(ids), vocabulary] after each of `ids`, as rows of one token over the same blocks."""
    n = len(ids)
    blocks = np.arange(1, -(-n // block_size) + 1, dtype=np.int32)
    tables = np.tile(blocks, (n, 1))
    rows, one = np.arange(n, dtype=np.int32), np.ones(n, np.int32)
    runner.engine.forward(np.array(ids, np.int32), rows, rows, one, rows, tables)
    logits = np.empty((n, runner.engine.padded_vocab), np.float32)
    bad = np.empty(n, np.uint8)
    for at in range(0, n, 128):
        runner.engine.head(at, logits[at : at + 128], bad[at : at + 128])
    assert not bad.any()
    return logits - np.array([[runner.engine.log_sum_exp(row)] for row in logits])
