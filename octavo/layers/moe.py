"""Mixture of experts (Shazeer et al. 2017): a router picks a few gated MLPs for each token and weighs their sum.

The reference form: one pass per expert that any token has chosen, which looks at the choice on the host; so a step
with it cannot be captured in a graph.

Shape letters: T tokens, I features, E experts, C experts a token uses, M features inside an expert.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kernels.reference import accumulate_dtype, silu_and_mul
from octavo.layers.base import Weights


class Moe:
    """x_TI -> y_TI with weights `<prefix>router`, `experts_gate`, `experts_up` and `experts_down`.

    `normalise`: the weights of a token's experts are divided by their sum.
    """

    def __init__(
        self, weights: Weights, prefix: str, hidden_size: int, size: int, experts: int, chosen: int, normalise: bool
    ) -> None:
        self._router_EI = weights.take(f"{prefix}router", experts, hidden_size)
        gate_EMI = weights.take(f"{prefix}experts_gate", experts * size, hidden_size).view(experts, size, hidden_size)
        up_EMI = weights.take(f"{prefix}experts_up", experts * size, hidden_size).view(experts, size, hidden_size)
        down_EIM = weights.take(f"{prefix}experts_down", experts * hidden_size, size)
        self._gate_up = torch.cat((gate_EMI, up_EMI), dim=1)
        self._down_EIM = down_EIM.view(experts, hidden_size, size)
        self._chosen = chosen
        self._normalise = normalise

    def __call__(self, x_TI: Tensor) -> Tensor:
        """The weighted sum of each token's experts."""
        weight_TC, expert_TC = self._route(x_TI)
        y_TI = torch.zeros_like(x_TI)
        for expert in torch.unique(expert_TC).tolist():
            token_N, place_N = torch.where(expert_TC == expert)
            inside = silu_and_mul(torch.nn.functional.linear(x_TI[token_N], self._gate_up[expert]))
            y_NI = torch.nn.functional.linear(inside, self._down_EIM[expert])
            y_TI.index_add_(0, token_N, y_NI * weight_TC[token_N, place_N, None])
        return y_TI

    def _route(self, x_TI: Tensor) -> tuple[Tensor, Tensor]:
        """(weight_TC, expert_TC): softmax over all experts, then the best C."""
        scores_TE = torch.nn.functional.linear(x_TI, self._router_EI)
        probs_TE = torch.softmax(scores_TE.to(accumulate_dtype(x_TI.dtype)), dim=-1)
        weight_TC, expert_TC = probs_TE.topk(self._chosen, dim=-1)
        if self._normalise:
            weight_TC = weight_TC / weight_TC.sum(-1, keepdim=True)
        return weight_TC.to(x_TI.dtype), expert_TC
