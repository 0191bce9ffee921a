"""From checkpoint to device: the tensors of a model, one after the other, in the type it will run in."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from octavo.errors import ConfigError
from octavo.kernels.quant import JoinedWeight, QuantWeight, Weight
from octavo.model.decoder import Decoder
from octavo.model.spec import ModelSpec
from octavo.quantization.online import quantize
from octavo.quantization.packed import Packed
from octavo.runner.memory import LAYER_PRODUCTS, kept_dtype
from octavo.weights.checkpoint import Array, Checkpoint, to_float32
from octavo.weights.load import Loaded, load
from octavo.weights.needs import TensorNeed

TORCH_DTYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
}

PLAIN = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}
"""tags of `octavo.weights.checkpoint` that torch has a type for"""

Put = Callable[[Array, torch.dtype], Tensor]
"""an array's bytes as a tensor of that type on a device"""


def torch_dtype(name: str) -> torch.dtype:
    """The torch type of a dtype name of `octavo.config`."""
    try:
        return TORCH_DTYPES[name]
    except KeyError:
        raise ConfigError(f"dtype {name!r} is not known.", f"Give one of {', '.join(TORCH_DTYPES)}.") from None


def kept(need: TensorNeed, dtype: torch.dtype) -> torch.dtype:
    """The torch type that a plain tensor of a model in `dtype` is kept in."""
    return torch_dtype(kept_dtype(need, str(dtype).removeprefix("torch.")))


def pick_device(wish: str) -> torch.device:
    """The device to run on; "auto" takes a CUDA device when there is one. ConfigError when it is not there."""
    if wish == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if wish == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            f"No CUDA device can be used here: {why_no_cuda()}", "Mend that, or take --device cpu, which needs none."
        )
    if wish not in ("cpu", "torch-cpu", "cuda"):
        raise ConfigError(f"device is {wish!r}.", "Give auto, cpu, torch-cpu or cuda.")
    return torch.device(wish.removeprefix("torch-"))


def why_no_cuda() -> str:
    """What keeps torch from CUDA, in the driver's or the loader's own words: an old driver, a missing library."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} was built without CUDA (the Linux default of pip has it)."
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError, OSError) as error:
        return str(error).splitlines()[0]
    return "torch finds the driver, but no device (see CUDA_VISIBLE_DEVICES)."


def to_tensor(array: Array, tag: str, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A weight as stored (see `octavo.weights.checkpoint` for the tags) as a tensor of its own on the device."""
    if tag == "BF16":
        stored = torch.from_numpy(np.array(array)).view(torch.bfloat16)
    elif tag in ("F16", "F32", "F64"):
        stored = torch.from_numpy(np.array(array))
    else:
        stored = torch.from_numpy(to_float32(array, tag))
    return stored.to(device=device, dtype=dtype)


def load_params(
    needs: Sequence[TensorNeed],
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    quantization: str = "",
) -> dict[str, Weight]:
    """Every tensor of the model under its internal name. Raises ModelError before anything is read.

    `quantization`: one of `octavo.quantization.scheme.ONLINE`, which the plain matrices of the layers become.
    """

    def put(array: Array, kind: torch.dtype) -> Tensor:
        return torch.from_numpy(np.array(array)).view(kind).to(device)

    params: dict[str, Weight] = {}
    for need, item in zip(needs, load(needs, checkpoint, quantised=products(needs)), strict=True):
        if item.parts:
            params[item.name] = quantised_weight(item, dtype, put)
        else:
            tensor = to_tensor(item.array, item.dtype, kept(need, dtype), device)
            params[item.name] = online(need, tensor, quantization)
    return params


def products(needs: Sequence[TensorNeed]) -> list[str]:
    """The names of those matrices that only products use, which may so be quantised."""
    return [need.name for need in needs if need.name.rpartition(".")[2] in (*LAYER_PRODUCTS, "head")]


def online(need: TensorNeed, tensor: Tensor, quantization: str) -> Weight:
    """The tensor, quantised if it is a matrix of a layer and that is wished."""
    if not quantization or need.name.rpartition(".")[2] not in LAYER_PRODUCTS:
        return tensor
    return quantize(tensor, quantization)


def quantised_weight(item: Loaded, dtype: torch.dtype, put: Put) -> Weight:
    """What `load` delivers as parts, on the device that `put` brings arrays to; plain parts in `dtype`."""
    parts: list[Tensor | QuantWeight] = []
    for part in item.parts:
        if isinstance(part, Packed):
            parts.append(_on_device(part, put))
        else:
            array, tag = part
            kind = PLAIN.get(tag, torch.float32)
            parts.append(put(array if tag in PLAIN else to_float32(array, tag), kind).to(dtype))
    return parts[0] if len(parts) == 1 else JoinedWeight(tuple(parts))


def _on_device(packed: Packed, put: Put) -> QuantWeight:
    codes = {"int4": torch.uint8, "int8": torch.int8, "fp8": torch.float8_e4m3fn}[packed.kind]
    scale = packed.input_scale
    return QuantWeight(
        packed.kind,
        packed.shape,
        put(packed.codes, codes),
        put(packed.scales_RG, torch.float16 if packed.scales_RG.dtype == np.float16 else torch.float32),
        packed.columns,
        packed.rows,
        None if packed.zeros_RG is None else put(packed.zeros_RG, codes),
        None if packed.order_I is None else put(packed.order_I, torch.int32),
        None if scale is None else put(np.array([scale], np.float32), torch.float32)[0],
    )


def build_decoder(
    spec: ModelSpec,
    needs: Sequence[TensorNeed],
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    quantization: str = "",
    fp8_kv: bool = False,
) -> Decoder:
    """The model, ready to run; arguments as those of `load_params` and `Decoder`."""
    return Decoder(spec, load_params(needs, checkpoint, dtype, device, quantization), fp8_kv=fp8_kv)
