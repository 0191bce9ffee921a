"""Mixture of experts (Shazeer et al. 2017): a router picks a few gated MLPs for each token and weighs their sum.

Three forms of one thing. On the processor, one pass per expert that any token has chosen, which looks at the choice.
On CUDA nothing may look, so that a step can be captured: the tokens are sorted by expert and a grouped product takes
each group with its expert's weights; types that it does not know pass through all experts, weighed by zero where not
chosen.

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
        if not x_TI.is_cuda:
            return self._by_choice(x_TI, weight_TC, expert_TC)
        if x_TI.dtype == torch.bfloat16:
            return self._grouped(x_TI, weight_TC, expert_TC)
        return self._by_all(x_TI, weight_TC, expert_TC)

    def _expert(self, expert: int, x_NI: Tensor) -> Tensor:
        inside = silu_and_mul(torch.nn.functional.linear(x_NI, self._gate_up[expert]))
        return torch.nn.functional.linear(inside, self._down_EIM[expert])

    def _by_choice(self, x_TI: Tensor, weight_TC: Tensor, expert_TC: Tensor) -> Tensor:
        y_TI = torch.zeros_like(x_TI)
        for expert in torch.unique(expert_TC).tolist():
            token_N, place_N = torch.where(expert_TC == expert)
            y_NI = self._expert(expert, x_TI[token_N])
            y_TI.index_add_(0, token_N, y_NI * weight_TC[token_N, place_N, None])
        return y_TI

    def _by_all(self, x_TI: Tensor, weight_TC: Tensor, expert_TC: Tensor) -> Tensor:
        y_TI = torch.zeros_like(x_TI)
        for expert in range(len(self._gate_up)):
            weight_T = (weight_TC * (expert_TC == expert)).sum(-1)
            y_TI += self._expert(expert, x_TI) * weight_T[:, None]
        return y_TI

    def _grouped(self, x_TI: Tensor, weight_TC: Tensor, expert_TC: Tensor) -> Tensor:
        """P pairs of token and expert, sorted by expert; `ends_E` is where each expert's pairs end."""
        experts_P = expert_TC.flatten()
        order_P = experts_P.argsort(stable=True)
        numbers_E = torch.arange(len(self._gate_up), device=x_TI.device)
        ends_E = torch.searchsorted(experts_P[order_P], numbers_E, right=True).to(torch.int32)
        product = torch.nn.functional.grouped_mm
        inside = silu_and_mul(product(x_TI[order_P // self._chosen], self._gate_up.transpose(1, 2), offs=ends_E))
        y_PI = product(inside, self._down_EIM.transpose(1, 2), offs=ends_E)
        y_PI = torch.empty_like(y_PI).index_copy_(0, order_P, y_PI)
        return (y_PI.view(*expert_TC.shape, -1) * weight_TC[..., None]).sum(1)

    def _route(self, x_TI: Tensor) -> tuple[Tensor, Tensor]:
        """(weight_TC, expert_TC): softmax over all experts, then the best C."""
        scores_TE = torch.nn.functional.linear(x_TI, self._router_EI)
        probs_TE = torch.softmax(scores_TE.to(accumulate_dtype(x_TI.dtype)), dim=-1)
        weight_TC, expert_TC = probs_TE.topk(self._chosen, dim=-1)
        if self._normalise:
            weight_TC = weight_TC / weight_TC.sum(-1, keepdim=True)
        return weight_TC.to(x_TI.dtype), expert_TC
