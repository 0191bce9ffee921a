"""A quantised safetensors checkpoint, seen as one with a tensor "<module>.weight" for each quantised matrix.

`QuantizedCheckpoint` stands in front of another checkpoint and hides the pieces (codes, scales, zeros, orders). Such
a tensor has the dtype tag "INT4", "INT8" or "FP8", the shape of the matrix, and the bytes of its pieces; it is read
by `packed`. All pieces are checked while opening, before any weight is read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from octavo.errors import ModelError
from octavo.quantization import formats
from octavo.quantization.packed import Packed
from octavo.quantization.scheme import Scheme
from octavo.weights.checkpoint import QUANTISED, Array, Checkpoint, TensorInfo, to_float32

_SCALES = ("F16", "BF16", "F32")
_FIX = "Check that the download is complete and that config.json belongs to the weights."


@dataclass(frozen=True, slots=True)
class _Module:
    """One quantised matrix: the reader of its pieces, what it is, and the names of the pieces."""

    read: Callable[[], Packed]
    info: TensorInfo
    pieces: tuple[str, ...]


class QuantizedCheckpoint:
    """See the module's docstring. Raises ModelError that names the tensor for whatever does not fit."""

    def __init__(self, inner: Checkpoint, scheme: Scheme) -> None:
        self._inner, self._scheme = inner, scheme
        self._present = set(inner.names())
        self._hidden: set[str] = set()
        self._modules: dict[str, _Module] = {}
        for name in inner.names():
            module, _, last = name.rpartition(".")
            if last == "qweight":
                self._add(module, self._awq(module) if scheme.method == "awq" else self._gptq(module))
            elif last == "weight_packed":
                self._add(module, self._pack_quantized(module))
            elif last == "weight" and inner.info(name).dtype == "F8_E4M3":
                self._add(module, self._fp8(module))
            elif last == "weight" and inner.info(name).dtype == "I8":
                self._add(module, self._int8(module))
        if not self._modules:
            raise ModelError(f"config.json says {scheme.line()}, but no matrix of the checkpoint is quantised.", _FIX)

    @property
    def scheme(self) -> Scheme:
        """How it is quantised, by its configuration."""
        return self._scheme

    def names(self) -> list[str]:
        """Plain tensors as they are, then the quantised matrices."""
        plain = [name for name in self._inner.names() if name not in self._hidden]
        return plain + list(self._modules)

    def info(self, name: str) -> TensorInfo:
        """Facts about one tensor; KeyError when there is none of that name."""
        return self._modules[name].info if name in self._modules else self._inner.info(name)

    def read(self, name: str) -> Array:
        """A plain tensor as stored; a quantised matrix in float32."""
        return self._modules[name].read().dequantize() if name in self._modules else self._inner.read(name)

    def packed(self, name: str) -> Packed:
        """A quantised matrix in the canonical layout."""
        try:
            return self._modules[name].read()
        except ModelError as error:
            raise ModelError(f"The quantised tensor {name!r} cannot be read: {error.cause}.", _FIX) from None

    def stored(self, name: str) -> list[Array]:
        """All that the files have of a tensor, as stored."""
        names = self._modules[name].pieces if name in self._modules else (name,)
        return [self._inner.read(piece) for piece in names]

    def _add(self, module: str, found: tuple[Callable[[], Packed], tuple[int, int], str, tuple[str, ...]]) -> None:
        read, shape, tag, pieces = found
        names = [f"{module}.{piece}" for piece in pieces if f"{module}.{piece}" in self._present]
        self._hidden.update(names)
        infos = [self._inner.info(name) for name in names]
        info = TensorInfo(f"{module}.weight", tag, shape, sum(info.nbytes for info in infos), infos[0].file)
        self._modules[info.name] = _Module(read, info, tuple(names))

    def _piece(self, name: str, dtypes: tuple[str, ...], shape: tuple[int, ...] | None = None) -> TensorInfo:
        """Facts about a piece that must be there; with `shape`, it must have that."""
        if name not in self._present:
            raise ModelError(f"The quantised checkpoint lacks {name!r}, which {self._scheme.method} needs.", _FIX)
        info = self._inner.info(name)
        if info.dtype not in dtypes or (shape is not None and info.shape != shape) or 0 in info.shape:
            wanted = f"{' or '.join(dtypes)}{'' if shape is None else f' of shape {list(shape)}'}"
            raise ModelError(f"{name} is {info.dtype} of shape {list(info.shape)} instead of {wanted}.", _FIX)
        return info

    def _optional(self, name: str, dtypes: tuple[str, ...], shape: tuple[int, ...]) -> str:
        """The name when there is such a piece, else ""."""
        if name not in self._present:
            return ""
        self._piece(name, dtypes, shape)
        return name

    def _groups(self, name: str, inputs: int, groups: int) -> None:
        """`name` has one scale for each of `groups` groups of `inputs` inputs, as config.json says."""
        wanted = inputs // self._scheme.group if self._scheme.group else 1
        if inputs % max(groups, 1) or groups != wanted or (self._scheme.group and inputs % self._scheme.group):
            size = self._scheme.group or inputs
            raise ModelError(f"{name} has {groups} groups for {inputs} inputs; groups of {size} make {wanted}.", _FIX)

    def _matrix(self, name: str, dims: int = 2) -> TensorInfo:
        info = self._piece(name, ("I32",))
        if len(info.shape) != dims:
            raise ModelError(f"{name} has shape {list(info.shape)} instead of {dims} dimensions.", _FIX)
        return info

    def _awq(self, module: str) -> tuple[Callable[[], Packed], tuple[int, int], str, tuple[str, ...]]:
        names = [f"{module}.{piece}" for piece in ("qweight", "qzeros", "scales")]
        inputs, words = self._matrix(names[0]).shape
        if inputs % 2:
            raise ModelError(f"{names[0]} has {inputs} inputs, an odd number.", _FIX)
        groups = (self._piece(names[2], _SCALES).shape or (0,))[0]
        self._groups(names[2], inputs, groups)
        self._piece(names[1], ("I32",), (groups, words))
        self._piece(names[2], _SCALES, (groups, words * 8))
        read = self._inner.read
        make = lambda: formats.awq(read(names[0]), read(names[1]), self._floats(names[2]))  # noqa: E731
        return make, (words * 8, inputs), "INT4", ("qweight", "qzeros", "scales", "bias_scales")

    def _gptq(self, module: str) -> tuple[Callable[[], Packed], tuple[int, int], str, tuple[str, ...]]:
        bits, offset = self._scheme.bits, self._scheme.zero_offset
        codes, zeros, scales = (f"{module}.{piece}" for piece in ("qweight", "qzeros", "scales"))
        words, outputs = self._matrix(codes).shape
        inputs = words * 32 // bits
        groups = (self._piece(scales, _SCALES).shape or (0,))[0]
        self._groups(scales, inputs, groups)
        self._piece(zeros, ("I32",), (groups, -(-outputs * bits // 32)))
        self._piece(scales, _SCALES, (groups, outputs))
        order = self._optional(f"{module}.g_idx", ("I32", "I64"), (inputs,))
        if self._scheme.ordered and not order:
            raise ModelError(f"The checkpoint was made with desc_act but lacks '{module}.g_idx'.", _FIX)
        read = self._inner.read

        def make() -> Packed:
            group_I = read(order) if order else None
            return formats.gptq(read(codes), read(zeros), self._floats(scales), group_I, bits, offset)

        return make, (outputs, inputs), f"INT{bits}", ("qweight", "qzeros", "scales", "g_idx")

    def _pack_quantized(self, module: str) -> tuple[Callable[[], Packed], tuple[int, int], str, tuple[str, ...]]:
        bits = self._scheme.bits
        codes, scales = f"{module}.weight_packed", f"{module}.weight_scale"
        outputs, words = self._matrix(codes).shape
        shape = f"{module}.weight_shape"
        self._piece(shape, ("I64", "I32"), (2,))
        rows, inputs = (int(size) for size in self._inner.read(shape))
        if rows != outputs or inputs * bits != words * 32:
            raise ModelError(f"{codes} is [{outputs}, {words}], which does not hold [{rows}, {inputs}].", _FIX)
        found = self._piece(scales, _SCALES).shape
        if len(found) != 2:
            raise ModelError(f"{scales} has shape {list(found)} instead of two dimensions.", _FIX)
        self._groups(scales, inputs, found[1])
        self._piece(scales, _SCALES, (outputs, found[1]) if found != (1, 1) else (1, 1))
        zeros = self._optional(f"{module}.weight_zero_point", ("I32",), (-(-outputs * bits // 32), found[1]))
        if self._scheme.zeros and not zeros:
            raise ModelError(f"The checkpoint is not symmetric but lacks '{module}.weight_zero_point'.", _FIX)
        order = self._optional(f"{module}.weight_g_idx", ("I32", "I64"), (inputs,))
        read = self._inner.read

        def make() -> Packed:
            group_I = read(order) if order else None
            zero_words = read(zeros) if zeros else None
            return formats.pack_quantized(read(codes), zero_words, self._floats(scales), group_I, inputs)

        pieces = ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx")
        return make, (outputs, inputs), f"INT{bits}", pieces

    def _fp8(self, module: str) -> tuple[Callable[[], Packed], tuple[int, int], str, tuple[str, ...]]:
        codes, inputs_scale = f"{module}.weight", f"{module}.input_scale"
        if len(self._inner.info(codes).shape) != 2:
            raise ModelError(f"{codes} has shape {list(self._inner.info(codes).shape)}, not two dimensions.", _FIX)
        outputs, inputs = self._inner.info(codes).shape
        inverse = f"{module}.weight_scale_inv" in self._present  # the name that block scales have, not their meaning
        scales = f"{module}.weight_scale_inv" if inverse else f"{module}.weight_scale"
        found = self._piece(scales, _SCALES).shape
        blocks = (-(-outputs // 128), -(-inputs // 128))
        known = ((), (1,), (1, 1), (outputs,), (outputs, 1)) if not self._scheme.group else (blocks,)
        if found not in known:
            wanted = " or ".join(str(list(shape)) for shape in known)
            raise ModelError(f"{scales} has shape {list(found)} instead of {wanted}.", _FIX)
        if inputs_scale in self._present and self._inner.info(inputs_scale).shape not in ((), (1,)):
            raise ModelError(f"{inputs_scale} is not one number.", _FIX)
        read = self._inner.read

        def make() -> Packed:
            known_scale = inputs_scale in self._present
            scale = float(self._floats(inputs_scale).reshape(-1)[0]) if known_scale else None
            return formats.fp8(read(codes), self._floats(scales), scale)

        pieces = ("weight", "weight_scale", "weight_scale_inv", "input_scale", "input_scale_ub")
        return make, (outputs, inputs), "FP8", pieces

    def _int8(self, module: str) -> tuple[Callable[[], Packed], tuple[int, int], str, tuple[str, ...]]:
        codes, scales = f"{module}.weight", f"{module}.weight_scale"
        outputs, inputs = self._inner.info(codes).shape
        if self._scheme.zeros:
            raise ModelError(f"{codes} is not symmetric, which is supported for packed weights only.", _FIX)
        found = self._piece(scales, _SCALES).shape
        if found not in ((), (1,), (1, 1), (outputs,), (outputs, 1)):
            raise ModelError(f"{scales} has shape {list(found)} instead of [{outputs}, 1].", _FIX)
        read = self._inner.read
        make = lambda: formats.int8(read(codes), self._floats(scales))  # noqa: E731
        return make, (outputs, inputs), "INT8", ("weight", "weight_scale", "input_scale", "weight_zero_point")

    def _floats(self, name: str) -> Array:
        """Scales as float16 or float32."""
        info, stored = self._inner.info(name), self._inner.read(name)
        return np.asarray(stored) if info.dtype == "F16" else to_float32(stored, info.dtype)


def stored_arrays(checkpoint: Checkpoint, name: str) -> list[Array]:
    """All that the files have of a tensor, as stored: views of mapped files where they are mapped."""
    return checkpoint.stored(name) if isinstance(checkpoint, QuantizedCheckpoint) else [checkpoint.read(name)]


def packed_tensor(checkpoint: Checkpoint, name: str) -> Packed:
    """The quantised matrix `name` of a checkpoint that says it has one (a dtype of `QUANTISED`)."""
    if not isinstance(checkpoint, QuantizedCheckpoint) or checkpoint.info(name).dtype not in QUANTISED:
        raise ModelError(f"{name!r} is not a quantised tensor.")
    return checkpoint.packed(name)
