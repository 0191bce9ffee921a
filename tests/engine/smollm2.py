"""SmolLM2-135M-Instruct as the reference outputs were made: dequantised, rounded to bfloat16, computed in float32."""

from __future__ import annotations

from pathlib import Path

import torch

from octavo.engine.client import ModelLimits
from octavo.engine.loop import EngineLoop
from octavo.model.decoder import Decoder
from octavo.model.gguf_keys import spec_from_gguf
from octavo.model.spec import weight_needs
from octavo.runner.build import load_params
from octavo.runner.torch_runner import TorchRunner
from octavo.scheduler.records import Limits
from octavo.scheduler.scheduler import Scheduler
from octavo.weights.gguf import GgufCheckpoint
from tests.engine.tiny import TinyEngine


def smollm2_decoder(path: Path) -> Decoder:
    checkpoint = GgufCheckpoint(path)
    spec = spec_from_gguf(checkpoint.metadata, checkpoint.names())
    params = load_params(weight_needs(spec, "gguf"), checkpoint, torch.bfloat16, torch.device("cpu"))
    return Decoder(spec, {name: tensor.float() for name, tensor in params.items()})


class SmolEngine(TinyEngine):
    """A hand-driven engine on the real model."""

    def __init__(
        self,
        decoder: Decoder,
        *,
        blocks: int = 1000,
        block_size: int = 16,
        budget: int = 512,
        seqs: int = 64,
        max_len: int = 1024,
        depth: int = 0,
        cache: bool = True,
    ) -> None:
        vocab, eos = decoder.spec.vocab_size, decoder.spec.eos_ids
        self.limits = ModelLimits(vocab, max_len, block_size, eos, cache)
        self.runner = TorchRunner(decoder, blocks=blocks + 1, block_size=block_size, rows=seqs, max_len=max_len)
        self.scheduler = Scheduler(Limits(seqs, budget, max_len, block_size, blocks + 1, vocab, cache))
        self.loop = EngineLoop(self.scheduler, self.runner, depth)
        self.tokens, self.logprobs, self.reasons, self.best, self.prompts = {}, {}, {}, {}, {}
