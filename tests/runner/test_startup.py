"""What the start of a CUDA engine does, as far as it needs no card."""

from __future__ import annotations

from dataclasses import replace

import torch

from octavo.model.decoder import Decoder
from octavo.model.spec import weight_needs
from octavo.runner.memory import weight_bytes
from octavo.runner.startup import dummy_params
from tests.engine.tiny import tiny_spec


def test_dummy_weights_have_the_types_that_are_counted() -> None:
    needs = weight_needs(replace(tiny_spec(), wide_norms=True), "hf")
    params = dummy_params(needs, torch.bfloat16, torch.device("cpu"))
    sizes: dict[str, int] = {}
    for weight in params.values():
        kind = str(weight.dtype).removeprefix("torch.")
        sizes[kind] = sizes.get(kind, 0) + weight.nbytes
    assert sizes == weight_bytes(needs, "bfloat16")
    assert set(sizes) == {"bfloat16", "float32"}


def test_layers_that_run_other_kernels() -> None:
    spec = tiny_spec()
    same, other = spec.layers[0], replace(spec.layers[0], mlp_size=128)
    windowed = replace(same, window=8)
    spec = replace(spec, layers=(same, same, other, windowed, same, windowed))
    needs = weight_needs(spec, "hf")
    decoder = Decoder(spec, dummy_params(needs, torch.float32, torch.device("cpu")))
    assert decoder.unlike == [0, 2, 3]
