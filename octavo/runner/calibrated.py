"""Quantising a whole model with a calibration text, layer after layer, each on what the quantised ones before it
give.

`quantise` changes the decoder's own tensors: afterwards the decoder computes what the checkpoint will. AWQ's scales
of columns go into whatever made those inputs: the norm before, the rows of v, the rows of up.

Shape letters: T tokens, I inputs, O outputs, J heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import linear as product

from octavo.errors import ConfigError
from octavo.kernels import reference
from octavo.kernels.cpu import AddFn, LinearFn, Norm
from octavo.kernels.ops import Ops
from octavo.kernels.quant import QuantWeight, Weight
from octavo.layers.attention import HeadNorm, Mix
from octavo.model.decoder import Decoder
from octavo.model.spec import ModelSpec
from octavo.quantization import solve
from octavo.quantization.solve import Rounded
from octavo.runner.memory import LAYER_PRODUCTS

METHODS = ("awq", "gptq", "rtn")


@dataclass(slots=True)
class Seen:
    """What one product was given: sum of x x^T, sum of |x|, tokens."""

    moments_II: Tensor
    total_I: Tensor
    tokens: int = 0

    def scaled(self, scale_I: Tensor) -> Seen:
        """The same, had the inputs been divided by `scale_I`."""
        return Seen(self.moments_II / scale_I / scale_I[:, None], self.total_I / scale_I, self.tokens)

    @property
    def mean_I(self) -> Tensor:
        """Mean size of each input."""
        return self.total_I / max(self.tokens, 1)


@dataclass(slots=True)
class Tap:
    """Products in float32 that note what they are given, by the weight's identity, while `listening`."""

    seen: dict[int, Seen] = field(default_factory=dict)
    listening: bool = False

    def ops(self) -> Ops:
        """The kernels of a decoder that is to be listened to."""
        return Ops("tap", reference.rms_norm, reference.rotate, self.linear, self.gated_linear, self.linear_add)

    def linear(self, weight_OI: Tensor | QuantWeight, bias_O: Tensor | None, norm: Norm | None = None) -> LinearFn:
        """See `octavo.kernels.ops.Ops`."""
        if isinstance(weight_OI, QuantWeight):
            raise ConfigError("The model is quantised already.", "Give the model that it was made from.")

        def apply(x_TI: Tensor) -> Tensor:
            x_TI = x_TI if norm is None else reference.rms_norm(x_TI, *norm)
            if self.listening:
                self._note(id(weight_OI), x_TI)
            return product(x_TI, weight_OI, bias_O)

        return apply

    def gated_linear(
        self, weight_OI: Tensor | QuantWeight, bias_O: Tensor | None, norm: Norm | None = None
    ) -> LinearFn:
        """See `octavo.kernels.ops.Ops`."""
        both = self.linear(weight_OI, bias_O, norm)
        return lambda x_TI: reference.silu_and_mul(both(x_TI))

    def linear_add(self, weight_OI: Tensor | QuantWeight, bias_O: Tensor | None) -> AddFn:
        """See `octavo.kernels.ops.Ops`."""
        apply = self.linear(weight_OI, bias_O)
        return lambda x_TI, residual_TO: apply(x_TI) + residual_TO

    def _note(self, weight: int, x_TI: Tensor) -> None:
        wide = x_TI.float()
        moments_II, total_I = wide.T @ wide, wide.abs().sum(0)
        known = self.seen.get(weight)
        if known is None:
            self.seen[weight] = Seen(moments_II, total_I, len(x_TI))
        else:
            known.moments_II += moments_II
            known.total_I += total_I
            known.tokens += len(x_TI)


@torch.inference_mode()
def quantise(
    spec: ModelSpec,
    params: dict[str, Weight],
    texts: Sequence[Sequence[int]],
    method: str,
    group: int,
    progress: Callable[[Iterable[int]], Iterable[int]] = iter,
) -> dict[str, Rounded]:
    """Codes of every matrix of the layers by internal name, in groups of `group` inputs.

    `params`: all weights in float32; norms, biases and matrices are changed in place, and stay with the caller.
    `texts`: token ids of pieces of the calibration text, equally long. Raises ConfigError, ModelError.
    """
    _check(spec, method, group)
    kept = {name: tensor for name, tensor in params.items() if isinstance(tensor, Tensor)}
    if method == "rtn":
        names = [name for name in kept if name.rpartition(".")[2] in LAYER_PRODUCTS]
        return {name: solve.nearest(kept[name], group) for name in names}
    tap = Tap()
    decoder = Decoder(spec, dict(params), "reference", ops=tap.ops())
    ids_T = torch.tensor([list(text) for text in texts], device=decoder.device)
    mix = _alone(decoder, ids_T.shape[1])
    streams = [decoder.embed(ids) for ids in ids_T]
    found: dict[str, Rounded] = {}
    for index in progress(range(len(spec.layers))):
        layer = decoder.layers[index]
        tap.listening = True
        for stream_TI in streams:
            layer(stream_TI.clone(), mix)
        tap.listening = False
        weights = {name.rpartition(".")[2]: x for name, x in kept.items() if name.startswith(f"layers.{index}.")}
        seen = {name: tap.seen.pop(id(weights[name])) for name in LAYER_PRODUCTS}
        if method == "awq":
            _fold(spec, weights, seen, group)
        for name in LAYER_PRODUCTS:
            rounded = _round(spec, name, weights[name], seen[name], method, group)
            weights[name].copy_(rounded.dequantize())
            found[f"layers.{index}.{name}"] = rounded
        streams = [layer(stream_TI, mix) for stream_TI in streams]
    return found


def _check(spec: ModelSpec, method: str, group: int) -> None:
    if method not in METHODS:
        raise ConfigError(f"method is {method!r}.", f"Give one of {', '.join(METHODS)}.")
    if any(layer.experts for layer in spec.layers):
        raise ConfigError("Models with experts cannot be quantised here.", "Take a published checkpoint.")
    widths = {spec.hidden_size, spec.heads * spec.head_dim, *(layer.mlp_size for layer in spec.layers)}
    if group not in (32, 64, 128) or any(width % group for width in widths):
        fits = [size for size in (128, 64, 32) if not any(width % size for width in widths)]
        sizes = ", ".join(map(str, fits)) or "none, so this model cannot be"
        raise ConfigError(f"Groups of {group} do not divide {sorted(widths)}.", f"Groups that do: {sizes}.")


def _alone(decoder: Decoder, length: int) -> Mix:
    """Attention of one sequence of `length` tokens that sees nothing but itself."""
    spec = decoder.spec
    heads = decoder.head_maker(torch.arange(length, device=decoder.device))

    def mix(layer: int, qkv_TJD: Tensor, norm: HeadNorm | None) -> Tensor:
        q_THD, k_TKD, v_TKD = heads(layer, qkv_TJD, norm)
        window = spec.layers[layer].window
        return reference.attend_row(q_THD, k_TKD, v_TKD, spec.softmax_scale, spec.attention_softcap, window)[0]

    return mix


def _round(spec: ModelSpec, name: str, weight_OI: Tensor, seen: Seen, method: str, group: int) -> Rounded:
    if method == "gptq":
        return solve.gptq(weight_OI, seen.moments_II, group, seen.tokens)
    importance_I = seen.moments_II.diagonal()
    if name != "qkv":
        return solve.clipped(weight_OI, importance_I, group)
    cut = (spec.heads + spec.kv_heads) * spec.head_dim  # clipping q and k would move every score of a head
    parts = solve.nearest(weight_OI[:cut], group), solve.clipped(weight_OI[cut:], importance_I, group)
    return Rounded(
        torch.cat([part.codes for part in parts]),
        torch.cat([part.scales_OG for part in parts]),
        torch.cat([part.zeros_OG for part in parts]),
        group,
    )


def _fold(spec: ModelSpec, weights: dict[str, Tensor], seen: dict[str, Seen], group: int) -> None:
    """AWQ's scales of the inputs of all four matrices, into them and into what makes their inputs."""

    def scale_of(name: str) -> Tensor:
        return solve.awq_scales(weights[name], seen[name].moments_II, seen[name].mean_I, group)

    def apply(name: str, scale_I: Tensor) -> None:
        weights[name].mul_(scale_I)
        seen[name] = seen[name].scaled(scale_I)

    def shrink_rows(name: str, start: int, scale_I: Tensor) -> None:
        weights[name][start : start + len(scale_I)] /= scale_I[:, None]
        if f"{name}_bias" in weights:
            weights[f"{name}_bias"][start : start + len(scale_I)] /= scale_I

    kv_heads, dim = spec.kv_heads, spec.head_dim
    by_head_KGD = scale_of("o").view(kv_heads, -1, dim)  # the query heads of a group share the values of one head
    value_KD = by_head_KGD.log().mean(1).exp()
    apply("o", value_KD[:, None].expand_as(by_head_KGD).reshape(-1))
    shrink_rows("qkv", (spec.heads + kv_heads) * dim, value_KD.reshape(-1))
    down_I = scale_of("down")
    apply("down", down_I)
    shrink_rows("gate_up", len(down_I), down_I)
    for name, norm in (("qkv", "attn_norm"), ("gate_up", "mlp_norm")):
        scale_I = scale_of(name)
        apply(name, scale_I)
        weights[norm].div_(scale_I)
