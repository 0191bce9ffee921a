"""What all layers share: they take their tensors out of one dict and keep them; no module tree.

A layer is a plain object made once from `Weights`, with a `__call__` that takes and returns tensors.
Nothing is registered anywhere and nothing is global: what a layer uses is what its constructor was given.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.errors import ModelError
from octavo.kernels.ops import Ops, ops_for
from octavo.kernels.quant import Weight
from octavo.kernels.reference import accumulate_dtype


class Weights:
    """The loaded tensors by internal name (`octavo.model.spec.weight_needs`), handed out once each.

    Takes ownership: an entry leaves `params` when a layer takes it, so a weight that is repacked does not
    stay in memory twice. `leftover()` after the model is built must be empty.
    """

    def __init__(self, params: dict[str, Weight], ops: Ops | None = None) -> None:
        first = next((value for value in params.values() if isinstance(value, Tensor)), None)
        if first is None:
            raise ModelError("A model cannot be built from no tensors at all.")
        self._params = params
        self.dtype: torch.dtype = first.dtype
        self.device: torch.device = first.device
        self.ops: Ops = ops or ops_for(first.device)

    def take(self, name: str, *shape: int, wide: bool = False) -> Tensor:
        """Remove and return one tensor; `ModelError` if it is missing or has another shape or dtype.

        `wide`: it may also be of the dtype that sums over the model's own run in.
        """
        tensor = self.take_weight(name, *shape)
        if not isinstance(tensor, Tensor):
            raise ModelError(f"The tensor {name!r} is quantised, which is not supported where the model uses it.")
        dtypes = (self.dtype, accumulate_dtype(self.dtype)) if wide else (self.dtype,)
        if tensor.dtype not in dtypes or tensor.device != self.device:
            raise ModelError(
                f"The tensor {name!r} is {tensor.dtype} on {tensor.device}; "
                f"the others are {self.dtype} on {self.device}."
            )
        return tensor

    def take_weight(self, name: str, *shape: int) -> Weight:
        """As `take`, for a matrix that only products use: it may be quantised. Only the shape is checked."""
        weight = self._params.pop(name, None)
        if weight is None:
            raise ModelError(f"The model needs the tensor {name!r}, which was not loaded.")
        if tuple(weight.shape) != shape:
            raise ModelError(f"The tensor {name!r} has shape {tuple(weight.shape)}; the model needs {shape}.")
        return weight

    def leftover(self) -> list[str]:
        """Names that no layer has taken."""
        return list(self._params)
