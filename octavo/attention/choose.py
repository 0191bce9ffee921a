"""Which attention backend serves a model on a device, checked against what the backend can do."""

from __future__ import annotations

import importlib.util

import torch

from octavo.attention.base import AttentionBackend, AttentionShape
from octavo.attention.reference import ReferenceAttention
from octavo.attention.torch_cpu import TorchCpuAttention
from octavo.errors import ConfigError

NAMES = ("triton", "torch_cpu", "reference")
"""fastest first"""


def _class(name: str) -> type[AttentionBackend]:
    if name == "triton":
        from octavo.attention.triton import TritonAttention

        return TritonAttention
    return TorchCpuAttention if name == "torch_cpu" else ReferenceAttention


def choose_backend(
    shape: AttentionShape, dtype: torch.dtype, device: torch.device, name: str | None = None, fp8_kv: bool = False
) -> AttentionBackend:
    """The named backend, or the first that can serve this model on this device; `fp8_kv`: with a KV pool in FP8.

    `ConfigError` if the name is unknown or the named backend lacks what the model needs.
    """
    if name is not None and name not in NAMES:
        raise ConfigError(f"Unknown attention backend {name!r}.", f"Known: {', '.join(NAMES)}.")
    lacks = ""
    for known in NAMES:
        if name in (None, known):
            lacks = _lacks(known, shape, dtype, device, fp8_kv)
            if not lacks:
                return _class(known)(shape, dtype)  # type: ignore[call-arg]
    raise ConfigError(
        f"The attention backend {name!r} cannot serve this model: {lacks}.", "Leave the choice to Octavo."
    )


def _lacks(name: str, shape: AttentionShape, dtype: torch.dtype, device: torch.device, fp8_kv: bool) -> str:
    """What the backend cannot do for this model, in words; empty if it can serve it."""
    if name == "triton" and device.type != "cuda":
        return f"it runs on cuda, the model is on {device.type}"
    if name == "triton" and importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    can = _class(name).capabilities
    if can.device not in ("any", device.type):
        return f"it runs on {can.device}, the model is on {device.type}"
    if dtype not in can.dtypes:
        return f"it does not compute in {dtype}"
    if fp8_kv and not can.fp8_kv:
        return "it has no KV cache in FP8"
    if shape.softcap and not can.softcap:
        return f"it has no soft-cap ({shape.softcap:g} is needed)"
    if shape.window and not can.window:
        return f"it has no sliding window ({shape.window} is needed)"
    return ""
