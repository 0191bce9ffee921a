"""What a checkpoint's `config.json` says about its quantisation, as plain values.

Which matrices are quantised is decided by the tensors that the files have (`octavo.weights.quantized`); the patterns
here are for planning without files, and everything that cannot be loaded is refused here, before any file is opened.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from octavo.errors import ModelError

Method = Literal["awq", "gptq", "compressed-tensors", "fp8"]

METHODS: dict[str, Method] = {
    "awq": "awq",
    "gptq": "gptq",
    "compressed-tensors": "compressed-tensors",
    "fp8": "fp8",
    "fbgemm_fp8": "fp8",
}
GROUPS = (32, 64, 128)
ONLINE: tuple[Literal["fp8", "int8", "int4"], ...] = ("fp8", "int8", "int4")
"""what plain weights can be quantised to while they are loaded"""
_ONLINE_GROUPS = (64, 32)
_FIX = f"Take a checkpoint of the kinds {', '.join(dict.fromkeys(METHODS.values()))}, or one that is not quantised."


def online_group(inputs: int) -> int:
    """Inputs that share a scale where a plain matrix becomes int4: 64, or 32, or a row, where 64 do not divide it."""
    return next((size for size in _ONLINE_GROUPS if inputs % size == 0), inputs)


@dataclass(frozen=True, slots=True)
class Scheme:
    """One way of quantising the matrices of a model's layers.

    bits: of one weight. group: inputs that share a scale; 0 = all of a row; 128 for FP8 in blocks. zeros: groups have
    a zero of their own. ordered: columns may lie in the order of their importance. zero_offset: see
    `octavo.quantization.formats.gptq`. ignored: names or regular expressions ("re:...") of modules left as they are.
    """

    method: Method
    kind: Literal["int4", "int8", "fp8"]
    bits: int
    group: int = 0
    zeros: bool = False
    ordered: bool = False
    zero_offset: int = 0
    ignored: tuple[str, ...] = ("lm_head",)

    def line(self) -> str:
        """In a few words, for the log."""
        grouped = "128 x 128 blocks" if self.kind == "fp8" and self.group else f"groups of {self.group}"
        return f"{self.method}, {self.bits} bits, {grouped if self.group else 'one scale a row'}"

    def covers(self, module: str) -> bool:
        """Whether the module (a checkpoint name without ".weight") should be quantised."""
        for pattern in self.ignored:
            if pattern.startswith("re:"):
                if re.match(pattern[3:], module):
                    return False
            elif module == pattern or module.endswith("." + pattern) or f".{pattern}." in f".{module}.":
                return False
        return True


def scheme_from_config(config: Mapping[str, Any]) -> Scheme | None:
    """The scheme of a Hugging Face config; None when the checkpoint is not quantised. ModelError for others."""
    found = config.get("quantization_config") or config.get("compression_config")
    if found is None:
        return None
    if not isinstance(found, Mapping):
        raise ModelError(f"quantization_config is {found!r}, not an object.", _FIX)
    name = str(found.get("quant_method", ""))
    if name not in METHODS:
        raise ModelError(f"The checkpoint is quantised by {name!r}, which is not supported.", _FIX)
    method = METHODS[name]
    make = {"awq": _awq, "gptq": _gptq, "compressed-tensors": _compressed, "fp8": _fp8}[method]
    return make(found)


def _awq(found: Mapping[str, Any]) -> Scheme:
    version = str(found.get("version", "gemm")).lower()
    if version != "gemm":
        raise ModelError(f"The AWQ checkpoint has the layout {version!r}; only gemm is supported.", _FIX)
    bits = _integer(found, "bits", found.get("w_bit", 4))
    if bits != 4:
        raise ModelError(f"The AWQ checkpoint has {bits} bits; only 4 are supported.", _FIX)
    group = _group(_integer(found, "group_size", found.get("q_group_size", 128)))
    return Scheme("awq", "int4", 4, group, bool(found.get("zero_point", True)), ignored=_ignored(found))


def _gptq(found: Mapping[str, Any]) -> Scheme:
    bits = _integer(found, "bits", 4)
    if bits not in (4, 8):
        raise ModelError(f"The GPTQ checkpoint has {bits} bits; 4 and 8 are supported.", _FIX)
    layout = str(found.get("checkpoint_format") or found.get("format") or "gptq")
    if layout not in ("gptq", "gptq_v2"):
        raise ModelError(f"The GPTQ checkpoint has the layout {layout!r}; gptq and gptq_v2 are supported.", _FIX)
    if changed := [name for name in found.get("dynamic") or {} if not name.startswith("-")]:
        raise ModelError(f"The GPTQ checkpoint has other settings for some modules ({changed[0]!r}).", _FIX)
    group = _group(_integer(found, "group_size", 128))
    ignored = tuple(f"re:{name[1:].removeprefix(':')}" for name in found.get("dynamic") or {})
    if not found.get("lm_head"):
        ignored += ("lm_head",)
    ordered, offset = bool(found.get("desc_act")), int(layout == "gptq")
    kind: Literal["int4", "int8"] = "int4" if bits == 4 else "int8"
    return Scheme("gptq", kind, bits, group, not found.get("sym", True), ordered, offset, ignored)


def _fp8(found: Mapping[str, Any]) -> Scheme:
    if (kind := str(found.get("fmt") or "e4m3")) not in ("e4m3", "float8_e4m3fn"):
        raise ModelError(f"The FP8 checkpoint has weights in {kind}; only e4m3 is supported.", _FIX)
    block = found.get("weight_block_size")
    if block is not None and list(block) != [128, 128]:
        raise ModelError(f"The FP8 checkpoint has blocks of {block}; only 128 x 128 are supported.", _FIX)
    return Scheme("fp8", "fp8", 8, 128 if block else 0, ignored=_ignored(found))


def _compressed(found: Mapping[str, Any]) -> Scheme:
    sparsity = found.get("sparsity_config") or {}
    if isinstance(sparsity, Mapping) and sparsity.get("format", "dense") != "dense":
        raise ModelError(f"The checkpoint is sparse ({sparsity.get('format')!r}), which is not supported.", _FIX)
    if (found.get("transform_config") or {}).get("config_groups"):
        raise ModelError("The checkpoint rotates activations (transform_config), which is not supported.", _FIX)
    groups = found.get("config_groups") or {}
    weights = [group.get("weights") or {} for group in groups.values()]
    if not weights or any(one != weights[0] for one in weights[1:]):
        raise ModelError(f"The checkpoint has {len(weights)} ways of quantising; one is supported.", _FIX)
    first = weights[0]
    bits, kind, strategy = _integer(first, "num_bits", 8), first.get("type", "int"), first.get("strategy", "tensor")
    ignored = tuple(str(name) for name in found.get("ignore") or ())
    if kind == "float" and bits == 8 and strategy in ("tensor", "channel", "block"):
        block = first.get("block_structure")
        if strategy == "block" and list(block or ()) != [128, 128]:
            raise ModelError(f"The FP8 checkpoint has blocks of {block}; only 128 x 128 are supported.", _FIX)
        return Scheme("compressed-tensors", "fp8", 8, 128 if strategy == "block" else 0, ignored=ignored)
    if kind != "int" or bits not in (4, 8) or strategy not in ("tensor", "channel", "group"):
        raise ModelError(f"The checkpoint has weights of type {kind}, {bits} bits, by {strategy}.", _FIX)
    group = _group(_integer(first, "group_size", -1)) if strategy == "group" else 0
    zeros, ordered = not first.get("symmetric", True), first.get("actorder") in ("group", True)
    named: Literal["int4", "int8"] = "int4" if bits == 4 else "int8"
    return Scheme("compressed-tensors", named, bits, group, zeros, ordered, ignored=ignored)


def _group(size: int) -> int:
    if size in (-1, 0):
        return 0
    if size not in GROUPS:
        known = ", ".join(map(str, GROUPS))
        raise ModelError(f"The checkpoint has groups of {size}; {known} and -1 can be read.", _FIX)
    return size


def _integer(found: Mapping[str, Any], name: str, default: Any) -> int:
    value = found.get(name, default)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int):
        raise ModelError(f"The checkpoint's quantisation has {name} = {value!r}, not a whole number.", _FIX)
    return value


def _ignored(found: Mapping[str, Any]) -> tuple[str, ...]:
    names = found.get("modules_to_not_convert") or found.get("ignored_layers") or ()
    return (*(str(name) for name in names), "lm_head")
