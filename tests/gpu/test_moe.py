"""Mixture of experts on CUDA, captured in a graph, against the form that looks at the choice."""

from __future__ import annotations

import pytest
import torch

from octavo.layers.base import Weights
from octavo.layers.moe import Moe

pytestmark = pytest.mark.gpu

SIZES = {"hidden": 256, "size": 128, "experts": 16, "chosen": 4}


def layer(dtype: torch.dtype, device: str) -> Moe:
    generator = torch.Generator().manual_seed(5)

    def weight(rows: int, columns: int) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=generator) / columns**0.5).to(dtype).to(device)

    hidden, size, experts = SIZES["hidden"], SIZES["size"], SIZES["experts"]
    params = {
        "router": weight(experts, hidden),
        "experts_gate": weight(experts * size, hidden),
        "experts_up": weight(experts * size, hidden),
        "experts_down": weight(experts * hidden, size),
    }
    return Moe(Weights(params), "", hidden, size, experts, SIZES["chosen"], True)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.bfloat16, 2e-2), (torch.float32, 1e-5)])
@pytest.mark.parametrize("tokens", [1, 3, 64, 300])
def test_captured_equals_by_choice(dtype: torch.dtype, limit: float, tokens: int) -> None:
    moe, x = layer(dtype, "cuda"), torch.zeros(tokens, SIZES["hidden"], dtype=dtype, device="cuda")
    moe(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = moe(x)
    for seed in (1, 2):  # other tokens, other experts
        x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        want = moe._by_choice(x, *moe._route(x))
        assert float((y - want).norm() / want.norm()) < limit
