"""SmolLM2-135M-Instruct as the reference outputs were made: dequantised, rounded to bfloat16, computed in float32."""

from __future__ import annotations

from pathlib import Path

import torch

from octavo.model.decoder import Decoder
from octavo.model.gguf_keys import spec_from_gguf
from octavo.model.spec import weight_needs
from octavo.runner.build import load_params
from octavo.weights.gguf import GgufCheckpoint
from tests.engine.tiny import TinyEngine


def smollm2_decoder(path: Path) -> Decoder:
    checkpoint = GgufCheckpoint(path)
    spec = spec_from_gguf(checkpoint.metadata, checkpoint.names())
    params = load_params(weight_needs(spec, "gguf"), checkpoint, torch.bfloat16, torch.device("cpu"))
    return Decoder(spec, {name: tensor.float() for name, tensor in params.items()})


class SmolEngine(TinyEngine):
    """A hand-driven engine on the real model."""

    def __init__(self, decoder: Decoder, *, blocks: int = 1000, budget: int = 512, **sizes: int) -> None:
        super().__init__(decoder, blocks=blocks, budget=budget, **sizes)
