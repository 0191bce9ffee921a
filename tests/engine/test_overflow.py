"""CASE B-65: values beyond float16's range end the request that has them, not its neighbours, and never as text."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from octavo.model.decoder import Decoder
from octavo.model.spec import weight_needs
from octavo.runner.build import load_params
from octavo.types import SamplingParams
from octavo.weights.load import DummyCheckpoint
from tests.engine.tiny import TinyEngine, tiny_spec

LARGE = 77  # the id whose embedding is at the end of the range
PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=2)


def overflowing_decoder() -> Decoder:
    """Float16; the largest embedding there is, and a last layer that adds to it."""
    spec = replace(tiny_spec(), tied_head=False)
    needs = weight_needs(spec, "hf")
    params = load_params(needs, DummyCheckpoint(needs, "F64", 0), torch.float16, torch.device("cpu"))
    params["embed"][LARGE] = torch.finfo(torch.float16).max
    params["layers.1.down"] *= 2000
    return Decoder(spec, params)


@pytest.mark.parametrize("depth", [0, 1])
def test_b65_overflow_ends_its_request_only(depth: int) -> None:
    decoder = overflowing_decoder()
    alone = TinyEngine(decoder, depth=depth)
    alone.submit(0, [5, 9, 11], PARAMS)
    alone.run()
    assert alone.reasons == {(0, 0): "length"}
    engine = TinyEngine(decoder, depth=depth)
    engine.submit(0, [5, 9, 11], PARAMS)
    engine.submit(1, [5, 9, LARGE], PARAMS)
    engine.run()
    assert engine.reasons == {(0, 0): "length", (1, 0): "error"}
    assert (1, 0) not in engine.tokens
    assert engine.tokens[0, 0] == alone.tokens[0, 0]
