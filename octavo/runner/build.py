"""From checkpoint to device: the tensors of a model, one after the other, in the type it will run in."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from octavo.errors import ConfigError
from octavo.kernels.quant import Weight
from octavo.model.decoder import Decoder
from octavo.model.spec import ModelSpec
from octavo.weights.checkpoint import Array, Checkpoint, to_float32
from octavo.weights.load import load
from octavo.weights.needs import TensorNeed

TORCH_DTYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
}


def torch_dtype(name: str) -> torch.dtype:
    """The torch type of a dtype name of `octavo.config`."""
    try:
        return TORCH_DTYPES[name]
    except KeyError:
        raise ConfigError(f"dtype {name!r} is not known.", f"Give one of {', '.join(TORCH_DTYPES)}.") from None


def pick_device(wish: str) -> torch.device:
    """The device to run on; "auto" takes a CUDA device when there is one. ConfigError when it is not there."""
    if wish == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if wish == "cuda" and not torch.cuda.is_available():
        raise ConfigError("No CUDA device can be used here.", "Run `octavo doctor` to see why, or take --device cpu.")
    if wish not in ("cpu", "torch-cpu", "cuda"):
        raise ConfigError(f"device is {wish!r}.", "Give auto, cpu, torch-cpu or cuda.")
    return torch.device(wish.removeprefix("torch-"))


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
    needs: Sequence[TensorNeed], checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device
) -> dict[str, Weight]:
    """Every tensor of the model under its internal name. Raises ModelError before anything is read."""
    params: dict[str, Weight] = {}
    for need, item in zip(needs, load(needs, checkpoint), strict=True):
        kept = torch.promote_types(dtype, torch.float32) if need.wide else dtype
        params[item.name] = to_tensor(item.array, item.dtype, kept, device)
    return params


def build_decoder(
    spec: ModelSpec, needs: Sequence[TensorNeed], checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device
) -> Decoder:
    """The model, ready to run."""
    return Decoder(spec, load_params(needs, checkpoint, dtype, device))
