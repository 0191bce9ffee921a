"""Quantising a whole model with a calibration text, in one forward pass over all of it.

GPTQ quantises each matrix when all its inputs are there, so that they come from the quantised ones before it. AWQ
looks at the plain model; its scales of columns go into whatever made those inputs: the norm before, the rows of v,
the rows of up. `quantise` changes the decoder's own tensors: afterwards they are what the checkpoint will hold.

Shape letters: T tokens, I inputs, O outputs, J heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention

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
_SAMPLE = 2048  # tokens on which AWQ tries its scales


@dataclass(slots=True)
class Seen:
    """What AWQ keeps of a product's inputs: a sample of tokens, second moments inside each group, mean of |x|."""

    sample_TI: Tensor
    moments_GSS: Tensor
    mean_I: Tensor

    @classmethod
    def of(cls, x_TI: Tensor, group: int) -> Seen:
        """Of all inputs on the calibration text."""
        step = -(-len(x_TI) // _SAMPLE)
        return cls(x_TI[::step].contiguous(), solve.group_moments(x_TI, group), x_TI.abs().mean(0))

    def scaled(self, scale_I: Tensor) -> Seen:
        """The same, had the inputs been divided by `scale_I`."""
        scale_GS = scale_I.view(self.moments_GSS.shape[:2])
        moments_GSS = self.moments_GSS / scale_GS[:, None] / scale_GS[..., None]
        return Seen(self.sample_TI / scale_I, moments_GSS, self.mean_I / scale_I)


Visit = Callable[[Tensor, Tensor], None]
"""(weight_OI, x_TI): called with all inputs of a product before it is computed; may change the weight"""


@dataclass(frozen=True, slots=True)
class Tap:
    """Products that show their weight and its inputs to a visitor first.

    Inputs are shown divided by the size of the residual stream that the outcome goes into, token by token, where it
    goes there at all: what follows are norms, so an error counts in parts of the stream. Without that the first
    token, whose stream is a hundred times larger in some models, decides alone.
    """

    visit: Visit

    def ops(self) -> Ops:
        """The kernels of a decoder that is to be listened to."""
        return Ops("tap", reference.rms_norm, reference.rotate, self.linear, self.gated_linear, self.linear_add)

    def linear(self, weight_OI: Tensor | QuantWeight, bias_O: Tensor | None, norm: Norm | None = None) -> LinearFn:
        """See `octavo.kernels.ops.Ops`."""
        plain_OI = _plain(weight_OI)

        def apply(x_TI: Tensor) -> Tensor:
            x_TI = x_TI if norm is None else reference.rms_norm(x_TI, *norm)
            self.visit(plain_OI, x_TI)
            return _product(x_TI, plain_OI, bias_O)

        return apply

    def gated_linear(
        self, weight_OI: Tensor | QuantWeight, bias_O: Tensor | None, norm: Norm | None = None
    ) -> LinearFn:
        """See `octavo.kernels.ops.Ops`."""
        both = self.linear(weight_OI, bias_O, norm)
        return lambda x_TI: reference.silu_and_mul(both(x_TI))

    def linear_add(self, weight_OI: Tensor | QuantWeight, bias_O: Tensor | None) -> AddFn:
        """See `octavo.kernels.ops.Ops`."""
        plain_OI = _plain(weight_OI)

        def apply(x_TI: Tensor, residual_TO: Tensor) -> Tensor:
            size_T1 = residual_TO.square().mean(-1, keepdim=True).sqrt().clamp_min(1e-6)
            self.visit(plain_OI, x_TI / size_T1)
            return _product(x_TI, plain_OI, bias_O) + residual_TO

        return apply


def _product(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """In bfloat16 where that is faster; it changes inputs by far less than 4-bit weights do."""
    if x_TI.is_cuda or torch.ops.mkldnn._is_mkldnn_bf16_supported():
        y_TO = linear(x_TI.bfloat16(), weight_OI.bfloat16()).float()
        return y_TO if bias_O is None else y_TO + bias_O
    return linear(x_TI, weight_OI, bias_O)


def _plain(weight_OI: Tensor | QuantWeight) -> Tensor:
    if isinstance(weight_OI, QuantWeight):
        raise ConfigError("The model is quantised already.", "Give the model that it was made from.")
    return weight_OI


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
    `texts`: token ids of pieces of the calibration text, equally long; all go through a layer together, so what is
    held beside the weights is a few vectors of the MLP for each token. Raises ConfigError, ModelError.
    """
    check(spec, method, group)
    kept = {name: tensor for name, tensor in params.items() if isinstance(tensor, Tensor)}
    if method == "rtn":
        names = [name for name in kept if name.rpartition(".")[2] in LAYER_PRODUCTS]
        return {name: solve.nearest(kept[name], group) for name in names}
    names_by_weight = {id(tensor): name for name, tensor in kept.items()}
    found: dict[str, Rounded] = {}
    seen: dict[str, Seen] = {}

    def visit(weight_OI: Tensor, x_TI: Tensor) -> None:
        name = names_by_weight[id(weight_OI)]
        if method == "awq":
            seen[name.rpartition(".")[2]] = Seen.of(x_TI, group)
        else:
            found[name] = solve.gptq(weight_OI, solve.second_moments(x_TI), group, len(x_TI))
            weight_OI.copy_(found[name].dequantize())

    decoder = Decoder(spec, dict(params), "reference", ops=Tap(visit).ops())
    ids_RT = torch.tensor([list(text) for text in texts], device=decoder.device)
    stream_TI, mix = decoder.embed(ids_RT.flatten()), _apart(decoder, *ids_RT.shape)
    for index in progress(range(len(spec.layers))):
        stream_TI = decoder.layers[index](stream_TI, mix)
        if method == "awq":
            weights = {name.rpartition(".")[2]: x for name, x in kept.items() if name.startswith(f"layers.{index}.")}
            _fold(spec, weights, seen, group)
            for name in LAYER_PRODUCTS:
                rounded = _clip(spec, name, weights[name], seen.pop(name))
                weights[name].copy_(rounded.dequantize())
                found[f"layers.{index}.{name}"] = rounded
    return found


def check(spec: ModelSpec, method: str, group: int) -> None:
    """ConfigError where `quantise` has no such method, or the model's matrices are not of such groups."""
    if method not in METHODS:
        raise ConfigError(f"method is {method!r}.", f"Give one of {', '.join(METHODS)}.")
    if any(layer.experts for layer in spec.layers):
        raise ConfigError("Models with experts cannot be quantised here.", "Take a published checkpoint.")
    widths = {spec.hidden_size, spec.heads * spec.head_dim, *(layer.mlp_size for layer in spec.layers)}
    if group not in (32, 64, 128) or any(width % group for width in widths):
        fits = [size for size in (128, 64, 32) if not any(width % size for width in widths)]
        sizes = ", ".join(map(str, fits)) or "none, so this model cannot be"
        raise ConfigError(f"Groups of {group} do not divide {sorted(widths)}.", f"Groups that do: {sizes}.")


def _apart(decoder: Decoder, rows: int, length: int) -> Mix:
    """Attention of sequences of `length` tokens, one after the other, each of which sees nothing but itself."""
    spec = decoder.spec
    heads = decoder.head_maker(torch.arange(length, device=decoder.device).repeat(rows))

    def mix(layer: int, qkv_TJD: Tensor, norm: HeadNorm | None) -> Tensor:
        window, scale, softcap = spec.layers[layer].window, spec.softmax_scale, spec.attention_softcap
        parts = heads(layer, qkv_TJD, norm)
        if not softcap and not 0 < window < length:
            q, k, v = (x.unflatten(0, (rows, length)).transpose(1, 2) for x in parts)
            o = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
            return o.transpose(1, 2).flatten(0, 1)
        split = zip(*(x.split(length) for x in parts), strict=True)
        return torch.cat([reference.attend_row(q, k, v, scale, softcap, window)[0] for q, k, v in split])

    return mix


def _clip(spec: ModelSpec, name: str, weight_OI: Tensor, seen: Seen) -> Rounded:
    if name != "qkv":
        return solve.clipped(weight_OI, seen.moments_GSS)
    cut = (spec.heads + spec.kv_heads) * spec.head_dim  # clipping q and k would move every score of a head
    group = seen.moments_GSS.shape[1]
    parts = solve.nearest(weight_OI[:cut], group), solve.clipped(weight_OI[cut:], seen.moments_GSS)
    return Rounded(
        torch.cat([part.codes for part in parts]),
        torch.cat([part.scales_OG for part in parts]),
        torch.cat([part.zeros_OG for part in parts]),
        group,
    )


def _fold(spec: ModelSpec, weights: dict[str, Tensor], seen: dict[str, Seen], group: int) -> None:
    """AWQ's scales of the inputs of all four matrices, into them and into what makes their inputs."""

    def scale_of(name: str, shared: tuple[int, int, int] | None = None) -> Tensor:
        return solve.awq_scales(weights[name], seen[name].sample_TI, seen[name].mean_I, group, shared)

    def apply(name: str, scale_I: Tensor) -> None:
        weights[name].mul_(scale_I)
        seen[name] = seen[name].scaled(scale_I)

    def shrink_rows(name: str, start: int, scale_I: Tensor) -> None:
        weights[name][start : start + len(scale_I)] /= scale_I[:, None]
        if f"{name}_bias" in weights:
            weights[f"{name}_bias"][start : start + len(scale_I)] /= scale_I

    kv_heads, dim = spec.kv_heads, spec.head_dim
    shared = kv_heads, spec.heads // kv_heads, dim  # the query heads of a group share the values of one head
    value_I = scale_of("o", shared)
    apply("o", value_I)
    shrink_rows("qkv", (spec.heads + kv_heads) * dim, value_I.view(shared)[:, 0].reshape(-1))
    down_I = scale_of("down")
    apply("down", down_I)
    shrink_rows("gate_up", len(down_I), down_I)
    for name, norm in (("qkv", "attn_norm"), ("gate_up", "mlp_norm")):
        scale_I = scale_of(name)
        apply(name, scale_I)
        weights[norm].div_(scale_I)
