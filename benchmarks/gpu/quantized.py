"""Times of the products with quantised weights on one CUDA device, for the products of a layer of an 8B model.

    python benchmarks/gpu/quantized.py OUT.json [few,many,kv] [--tune] [--compile I/N]

Each figure is the median of seven replays of a captured graph that goes through several copies of the weight, in all
larger than the cache; tokens and weights are random. `few`: the streaming kernels beside the library in bfloat16.
`many`: widening and FP8 products. `kv`: decode attention over pools in bfloat16 and FP8. `--tune` tries launches and
prints the best; with `--compile I/N` every N-th is only compiled, for a later run to find in Triton's cache. Limit:
4.3 TB/s of memory, measured on an H200.
"""

from __future__ import annotations

import json
import sys
from itertools import product

import torch
from kernels import Step
from replay import Slice, timed
from torch.nn.functional import linear

from octavo.attention.base import AttentionShape, KVPool
from octavo.attention.triton import cut_for
from octavo.kernels.gpu import decode, norm
from octavo.kernels.gpu.fp8 import multiply, multiply_then, quantize_tokens
from octavo.kernels.gpu.quantized import Packed, pack, widen
from octavo.kernels.gpu.quantized_linear import Parts, launch_for, quantized_linear
from octavo.kernels.gpu.quantized_tuned import MOST_TOKENS, Launch
from octavo.kernels.quant import QuantWeight

DEVICE = torch.device("cuda")
LAYER = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
KINDS = {"int4": 64, "int8": 0, "fp8": 0}
TOKENS = (1, 8, 16, 32, 64, 128)
OUT: dict[str, dict[str, float | str]] = {}
SHARED = Parts(DEVICE)


def report(name: str, seconds: float, nbytes: float, note: str = "") -> None:
    OUT[name] = {"us": seconds * 1e6, "TB/s": nbytes / seconds / 1e12, "note": note}
    if not Slice.parts:
        print(f"{name:32} {seconds * 1e6:8.1f} us {nbytes / seconds / 1e12:5.2f} TB/s {note}", flush=True)


def weight(kind: str, outputs: int, inputs: int) -> QuantWeight:
    """Random codes; int4 in groups of 64 with zeros, the others with one scale a row."""
    columns = KINDS[kind] or inputs
    shape = (outputs, inputs // columns)
    scales = (torch.rand(shape, device=DEVICE) + 0.5) / 500
    if kind == "fp8":
        codes = torch.randn(outputs, inputs, device=DEVICE, dtype=torch.bfloat16).to(torch.float8_e4m3fn)
        return QuantWeight("fp8", (outputs, inputs), codes, scales, columns)
    if kind == "int8":
        codes = torch.randint(-128, 128, (outputs, inputs), dtype=torch.int8, device=DEVICE)
        return QuantWeight("int8", (outputs, inputs), codes, scales.bfloat16(), columns)
    codes = torch.randint(0, 256, (outputs, inputs // 2), dtype=torch.uint8, device=DEVICE)
    zeros = torch.randint(0, 16, shape, dtype=torch.uint8, device=DEVICE)
    return QuantWeight("int4", (outputs, inputs), codes, scales.half(), columns, 1, zeros)


def nbytes(packed: Packed) -> int:
    held = (packed.words, packed.scales, packed.zeros)
    return sum(tensor.nbytes for tensor in held if tensor is not None)


def launches(kind: str, tokens: int, tune: bool, packed: Packed) -> list[Launch]:
    """What to try for so many tokens, or the tuned launch."""
    if not tune:
        return [launch_for(packed, tokens)]
    four = kind == "int4"
    if tokens <= 8:
        tiles, waves = ((64, 2), (32, 1)), (2.0, 4.0, 8.0) if four else (2.0, 4.0)
    elif tokens <= 32:
        tiles, waves = ((64, 2), (32, 1) if tokens <= 16 else (128, 4)), (2.0, 4.0) if four else (2.0,)
    else:
        tiles, waves = ((64, 4), (128, 8)), (1.0, 2.0) if four else (1.0,)
    raw = four and tokens <= 16
    return [Launch(o, max(8, tokens), w, 3, v, raw) for (o, w), v in product(tiles, waves)]


def few(tune: bool) -> None:
    for name, (outputs, inputs) in LAYER.items():
        for m in TOKENS:
            x = torch.randn(m, inputs, dtype=torch.bfloat16, device=DEVICE)
            y = torch.randn(m, outputs, dtype=torch.bfloat16, device=DEVICE)
            plain(name, x, y)
            for kind in KINDS:
                if m <= MOST_TOKENS[kind]:
                    streamed(name, kind, x, y, tune)


def plain(name: str, x: torch.Tensor, y: torch.Tensor) -> None:
    """The library's product and what follows it."""
    outputs, inputs = LAYER[name]
    copies = [torch.randn(outputs, inputs, dtype=torch.bfloat16, device=DEVICE) for _ in range(3)]

    def run(i: int) -> None:
        if name == "gate_up":
            norm.silu_and_mul(linear(x, copies[i]))
        else:
            y.addmm_(x, copies[i].t())

    report(f"{name} {len(x)} bfloat16", timed(run, len(copies)), 2 * outputs * inputs)


def streamed(name: str, kind: str, x: torch.Tensor, y: torch.Tensor, tune: bool) -> None:
    """The best launch of the kernel here."""
    gated = name == "gate_up"
    one = pack(weight(kind, *LAYER[name]))
    count = 0 if Slice.parts else max(1, int(120e6 // nbytes(one)))
    copies = [one] + [pack(weight(kind, *LAYER[name])) for _ in range(count)]
    found: list[tuple[float, str]] = []
    for launch in launches(kind, len(x), tune, one):

        def run(i: int, launch: Launch = launch) -> None:
            quantized_linear(x, copies[i], None, None if gated else y, gated, SHARED, launch)

        try:
            seconds = timed(run, len(copies))
        except Exception as error:  # a configuration that does not fit the device
            print(f"  {launch}: {str(error)[:80]}")
            continue
        cut = f"{launch.outputs},{launch.tokens},{launch.warps},{launch.stages}"
        shown = f"{cut},{launch.waves:.0f},{launch.raw:d}"
        OUT[f"{name} {len(x)} {kind} {shown}"] = {"us": seconds * 1e6}
        found.append((seconds, shown))
    notes = " ".join(f"{seconds * 1e6:.1f}:{shown}" for seconds, shown in sorted(found)[:4])
    report(f"{name} {len(x)} {kind}", min(found)[0], nbytes(one), notes)


def many() -> None:
    for name, (outputs, inputs) in LAYER.items():
        wide = [torch.randn(outputs, inputs, dtype=torch.bfloat16, device=DEVICE) for _ in range(2)]
        for kind in KINDS:
            widened(name, [pack(weight(kind, outputs, inputs)) for _ in range(3)])
        packed = [pack(weight("fp8", outputs, inputs)) for _ in range(3)]
        for m in (64, 256, 2048):
            in_fp8(name, torch.randn(m, inputs, dtype=torch.bfloat16, device=DEVICE), wide, packed)


def widened(name: str, copies: list[Packed]) -> None:
    size = nbytes(copies[0]) + 2 * copies[0].shape[0] * copies[0].shape[1]
    report(f"{name} widen {copies[0].kind}", timed(lambda i: widen(copies[i], torch.bfloat16), 3), size)


def in_fp8(name: str, x: torch.Tensor, wide: list[torch.Tensor], packed: list[Packed]) -> None:
    """Products of many tokens in bfloat16 and FP8, and what makes the tokens FP8."""
    flops, m = 2 * len(x) * wide[0].numel(), len(x)
    y = torch.zeros(m, len(wide[0]), dtype=torch.bfloat16, device=DEVICE)
    codes, scales = quantize_tokens(x, packed[0])
    plain_seconds = timed(lambda i: linear(x, wide[i]), 2)
    seconds = timed(lambda i: multiply(codes, scales, packed[i], None, torch.bfloat16), 3)
    report(f"{name} {m} bfloat16 product", plain_seconds, 0, f"{flops / plain_seconds / 1e12:.0f} TFLOP/s")
    report(f"{name} {m} fp8 product", seconds, 0, f"{flops / seconds / 1e12:.0f} TFLOP/s")
    seconds = timed(lambda i: multiply_then(codes, scales, packed[i], None, y, False, torch.bfloat16), 3)
    report(f"{name} {m} fp8 product, then scales", seconds, 0, f"{flops / seconds / 1e12:.0f} TFLOP/s")
    report(f"{name} {m} fp8 tokens", timed(lambda i: quantize_tokens(x, packed[i]), 3), 3 * x.numel())


def kv(tune: bool) -> None:
    """Decode attention of an 8B model's layer."""
    shape = AttentionShape(32, 8, 128, 128**-0.5)
    for batch, context in ((256, 2048), (32, 8192), (1, 8192)):
        step = Step(shape, [(context, 1)] * batch, 16)
        elements = batch * (context + 1) * 8 * 128 * 2
        report(f"{batch} x {context} bfloat16", timed(lambda i: step.run(), 3), 2 * elements)  # noqa: B023
        cut = cut_for(shape, torch.bfloat16, batch, SHARED.processors, fp8=True)
        step = Step(shape, [(context, 1)] * batch, 16, cut=cut)
        scales = torch.full((1, 2, 8), 0.02, device=DEVICE)
        step.pool = KVPool(1, step.pool.num_blocks, 16, 8, 128, torch.bfloat16, DEVICE, scales)
        step.pool.bits.random_(0, 120)
        key = "many fp8" if batch > 16 else "fp8"
        kept, found = decode.TUNED[key], []
        for choice in [kept, (128, 4, 5), (64, 4, 5), (64, 2, 3), (64, 2, 5), (32, 1, 5)] if tune else [kept]:
            decode.TUNED[key] = choice
            found.append((timed(lambda i: step.run(), 3), str(choice)))  # noqa: B023
        decode.TUNED[key] = kept
        notes = " ".join(f"{seconds * 1e6:.1f}:{shown}" for seconds, shown in sorted(found))
        report(f"{batch} x {context} fp8", min(found)[0], elements, notes)


def main() -> None:
    """Measure and print."""
    Slice.from_command_line()
    what = sys.argv[2].split(",") if len(sys.argv) > 2 and not sys.argv[2].startswith("--") else ["few", "many"]
    if "few" in what:
        few("--tune" in sys.argv)
    if "kv" in what:
        kv("--tune" in sys.argv)
    if "many" in what:
        many()
    with open(sys.argv[1], "w") as file:
        json.dump(OUT, file, indent=1)


if __name__ == "__main__":
    main()
