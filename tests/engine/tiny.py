"""A tiny model with random weights in float64, and an engine on it: exact, so that ids may not differ at all."""

from __future__ import annotations

import torch

from octavo.engine.client import ModelLimits, build_request
from octavo.engine.loop import EngineLoop
from octavo.model.decoder import Decoder
from octavo.model.spec import LayerSpec, ModelSpec, RopeSpec, weight_needs
from octavo.runner.base import TokenLogprobs
from octavo.runner.build import build_decoder
from octavo.runner.torch_runner import TorchRunner
from octavo.scheduler.records import REASONS, Limits
from octavo.scheduler.scheduler import Scheduler
from octavo.types import SamplingParams
from octavo.weights.load import DummyCheckpoint

VOCAB = 128
EOS = 2


def tiny_spec() -> ModelSpec:
    return ModelSpec(
        architecture="llama",
        vocab_size=VOCAB,
        hidden_size=64,
        heads=4,
        kv_heads=2,
        head_dim=16,
        layers=tuple(LayerSpec(mlp_size=96) for _ in range(2)),
        max_positions=4096,
        norm_eps=1e-5,
        rope=RopeSpec(),
        tied_head=True,
        dtype="float64",
        eos_ids=(EOS,),
    )


def tiny_decoder(dtype: torch.dtype = torch.float64, seed: int = 0) -> Decoder:
    spec = tiny_spec()
    needs = weight_needs(spec, "hf")
    return build_decoder(spec, needs, DummyCheckpoint(needs, "F64", seed), dtype, torch.device("cpu"))


class TinyEngine:
    """Scheduler, torch runner and loop, driven by hand; collects tokens and ends by (request, child)."""

    def __init__(
        self,
        decoder: Decoder,
        *,
        blocks: int = 400,
        block_size: int = 16,
        budget: int = 2048,
        seqs: int = 64,
        max_len: int = 1024,
        depth: int = 0,
        cache: bool = True,
        swap_blocks: int = 0,
    ) -> None:
        vocab, eos = decoder.spec.vocab_size, decoder.spec.eos_ids
        self.limits = ModelLimits(vocab, max_len, block_size, eos, cache)
        self.runner = TorchRunner(
            decoder, blocks=blocks + 1, block_size=block_size, rows=seqs, max_len=max_len, swap_blocks=swap_blocks
        )
        limits = Limits(seqs, budget, max_len, block_size, blocks + 1, vocab, cache, swap_blocks=swap_blocks)
        self.scheduler = Scheduler(limits)
        self.loop = EngineLoop(self.scheduler, self.runner, depth)
        self.tokens: dict[tuple[int, int], list[int]] = {}
        self.logprobs: dict[tuple[int, int], list[float]] = {}
        self.best: dict[tuple[int, int], list[TokenLogprobs]] = {}
        self.prompts: dict[int, dict[int, TokenLogprobs]] = {}  # request -> position -> report
        self.reasons: dict[tuple[int, int], str] = {}

    def submit(
        self,
        number: int,
        ids: list[int],
        params: SamplingParams,
        salt: str = "",
        bad: tuple[tuple[int, ...], ...] = (),
    ) -> None:
        self.loop.submit(build_request(number, ids, params, self.limits, salt, bad))

    def step(self) -> None:
        for batch in self.loop.step():
            rows = zip(batch.request_id.tolist(), batch.child.tolist(), batch.token.tolist(), strict=True)
            for i, (request, child, token) in enumerate(rows):
                self.tokens.setdefault((request, child), []).append(token)
                if i in batch.logprobs:
                    self.logprobs.setdefault((request, child), []).append(batch.logprobs[i].chosen)
                    self.best.setdefault((request, child), []).append(batch.logprobs[i])
            for request, first, entries in batch.prompts:
                self.prompts.setdefault(request, {}).update(enumerate(entries, first))
            for end in batch.ended:
                assert (end.request_id, end.child) not in self.reasons, "ended twice"
                self.reasons[end.request_id, end.child] = REASONS[end.reason]

    def run(self) -> None:
        while self.scheduler.has_work():
            self.step()
        pool = self.scheduler.state.pool
        assert pool.free == pool.usable, "blocks leaked"
