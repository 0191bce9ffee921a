"""Which attention backend serves a model on a device, checked against what the backend can do."""

from __future__ import annotations

import torch

from octavo.attention.base import AttentionBackend, AttentionShape
from octavo.attention.reference import ReferenceAttention
from octavo.attention.torch_cpu import TorchCpuAttention
from octavo.errors import ConfigError

_BACKENDS: dict[str, type[TorchCpuAttention] | type[ReferenceAttention]] = {
    "torch_cpu": TorchCpuAttention,
    "reference": ReferenceAttention,
}
"""fastest first"""


def choose_backend(
    shape: AttentionShape, dtype: torch.dtype, device: torch.device, name: str | None = None
) -> AttentionBackend:
    """The named backend, or the first that can serve this model on this device.

    `ConfigError` if the name is unknown or the named backend lacks what the model needs.
    """
    if name is not None and name not in _BACKENDS:
        raise ConfigError(f"Unknown attention backend {name!r}.", f"Known: {', '.join(_BACKENDS)}.")
    lacks = ""
    for known, backend in _BACKENDS.items():
        if name in (None, known):
            lacks = _lacks(known, shape, dtype, device)
            if not lacks:
                return backend(shape, dtype)
    raise ConfigError(
        f"The attention backend {name!r} cannot serve this model: {lacks}.", "Leave the choice to Octavo."
    )


def _lacks(name: str, shape: AttentionShape, dtype: torch.dtype, device: torch.device) -> str:
    """What the backend cannot do for this model, in words; empty if it can serve it."""
    can = _BACKENDS[name].capabilities
    if can.device not in ("any", device.type):
        return f"it runs on {can.device}, the model is on {device.type}"
    if dtype not in can.dtypes:
        return f"it does not compute in {dtype}"
    if shape.softcap and not can.softcap:
        return f"it has no soft-cap ({shape.softcap:g} is needed)"
    if shape.window and not can.window:
        return f"it has no sliding window ({shape.window} is needed)"
    return ""
