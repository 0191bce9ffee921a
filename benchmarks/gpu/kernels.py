"""Times of single kernels on one CUDA device, as microseconds and share of what the device can do.

    python benchmarks/gpu/kernels.py OUT.json [decode,prefill,prefix,small,sample,linear] [--tune]

Each figure is the median of seven replays of a captured graph of several launches; inputs are random and larger than
the cache. `--tune` tries block sizes, warps and stages around the values in `TUNED` and prints the best.
Limits: 4.3 TB/s of memory and 730 TFLOP/s in bfloat16, both measured on an H200.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable

import numpy as np
import replay
import torch

from octavo.attention import triton as triton_attention
from octavo.attention.base import AttentionShape, KVPool
from octavo.attention.triton import Sizes, TritonAttention, TritonPlan, cut_for, partials_for
from octavo.kernels.gpu import decode, linear, norm, prefill, rope, sample
from octavo.kernels.gpu.step import Cut, StepTables, begin
from octavo.scheduler.plan import PARAM_WORDS, SAMPLE, PlanDraft

DEVICE = torch.device("cuda")
TB, TFLOP = 4.3e12, 730e12
OUT: dict[str, dict[str, float]] = {}


def timed(function: Callable[[], object], launches: int = 10) -> float:
    """Seconds of one call."""
    return replay.timed(lambda _: function(), launches)


def report(name: str, seconds: float, nbytes: float = 0, flops: float = 0, note: str = "") -> None:
    floor = nbytes / TB + flops / TFLOP
    OUT[name] = {"us": seconds * 1e6, "TB/s": nbytes / seconds / 1e12, "TFLOP/s": flops / seconds / 1e12}
    rate = f"{nbytes / seconds / 1e12:6.2f} TB/s" if nbytes else f"{flops / seconds / 1e12:6.0f} TFLOP/s"
    print(f"{name:44} {seconds * 1e6:9.1f} us {rate} {100 * floor / seconds:4.0f} % {note}", flush=True)


class Step:
    """A step of rows with given (first position, tokens); rows of one token decode."""

    def __init__(
        self,
        shape: AttentionShape,
        rows: list[tuple[int, int]],
        block_size: int,
        shared: int = 0,
        cut: Cut | None = None,
    ) -> None:
        self.backend = TritonAttention(shape, torch.bfloat16)
        decodes = sum(1 for _, n in rows if n == 1)
        self.cut = cut or cut_for(shape, torch.bfloat16, max(decodes, 1), 132)
        needs = [-(-(s + n) // block_size) for s, n in rows]
        numbers = np.random.default_rng(0).permutation(sum(needs)).astype(np.int32) + 1
        draft, used = PlanDraft(0), 0
        for i, need in enumerate(needs):
            blocks = numbers[used : used + need].copy()
            blocks[: shared // block_size] = numbers[: shared // block_size]
            draft.write_table(i + 1, np.arange(need, dtype=np.int32), blocks)
            used += need
        fed = sum(n for _, n in rows if n > 1)
        if fed:
            draft.tokens.append(np.zeros(fed, np.int32))
        columns = [
            np.array(c, np.int64) for c in zip(*((i + 1, s, n, SAMPLE) for i, (s, n) in enumerate(rows)), strict=True)
        ]
        words = draft.encode(tuple(columns), decodes)
        count, tokens = len(rows), sum(n for _, n in rows)
        tiles = sum(-(-n // self.cut.tile) for _, n in rows if n > 1)
        items = self.cut.workers + count
        self.step = StepTables(count, tokens, items, tiles, shape.kv_heads, DEVICE)
        self.tables = torch.zeros((count + 1, max(needs)), dtype=torch.int32, device=DEVICE)
        params = torch.zeros((count + 1, PARAM_WORDS), dtype=torch.int32, device=DEVICE)
        last = torch.zeros(count + 1, dtype=torch.int64, device=DEVICE)
        words = np.concatenate([np.array([shared, 0, 0, 0], np.int32), words])
        self.words = torch.from_numpy(words).to(DEVICE)
        self.begin = lambda: begin(
            self.words, self.step, self.tables, params, last, self.cut, block_size, count, tokens
        )
        self.begin()
        self.pool = KVPool(1, sum(needs) + 1, block_size, shape.kv_heads, shape.head_dim, torch.bfloat16, DEVICE)
        self.pool.data.normal_()
        self.q = torch.randn(tokens, shape.heads, shape.head_dim, dtype=torch.bfloat16, device=DEVICE)
        partials = partials_for(shape, items, count, DEVICE)
        self.sizes = Sizes(tokens, count, self.cut if decodes else None, tiles, shared > 0)
        self.plan = TritonPlan(self.sizes, self.step, self.tables, self.step.slots_T, partials)
        self.own: tuple[torch.Tensor, torch.Tensor] | None = None
        if tiles:
            k, v = (torch.randn(tokens, shape.kv_heads, 128, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
            self.own = torch.cat((self.q, k), 1), torch.cat((self.q, k, v), 1)

    def run(self, own: bool = False) -> torch.Tensor:
        q = self.own[0][:, : self.q.shape[1]] if own and self.own else self.q
        return self.backend._attend(0, q, self.pool, self.plan, self.own if own else None)


def best(
    table: dict[str, tuple[int, ...]],
    choices: Iterable[tuple[int, ...]],
    measure: Callable[[], float],
    tune: bool,
    key: str = "half",
) -> tuple[float, tuple[int, ...]]:
    """The fastest of `choices` for `table[key]`, which keeps its value; only that value without `tune`."""
    kept, found = table[key], (float("inf"), table[key])
    for choice in choices if tune else [kept]:
        table[key] = choice
        try:
            found = min(found, result := (measure(), choice))
            if tune and not replay.Slice.parts:
                print(f"    {result[0] * 1e6:9.1f} us {choice}")
        except Exception as error:  # a configuration that does not fit the device
            print(f"  {choice}: {str(error)[:80]}")
    table[key] = kept
    return found


def bench_decode(tune: bool) -> None:
    rng = np.random.default_rng(1)
    mixed = [(int(n), 1) for n in rng.integers(100, 2048, 256)]
    cases = [
        ("256 x 1024, 32/8", 32, 8, [(1024, 1)] * 256), ("256 x 1024, 16/8", 16, 8, [(1024, 1)] * 256),
        ("256 x 100..2047, 16/8", 16, 8, mixed), ("128 x 100..2047, 16/8", 16, 8, mixed[:128]),
        ("32 x 8192, 32/8", 32, 8, [(8192, 1)] * 32), ("32 x 1024, 16/8", 16, 8, [(1024, 1)] * 32),
        ("8 x 1024, 16/8", 16, 8, [(1024, 1)] * 8), ("1 x 1024, 16/8", 16, 8, [(1024, 1)]),
        ("1 x 8192, 32/8", 32, 8, [(8192, 1)]), ("256 x 1024, 40/40", 40, 40, [(1024, 1)] * 256),
    ]  # fmt: skip
    for name, heads, kv_heads, rows in [cases[i] for i in (0, 2, 3, 5, 6, 7, 8)] if tune else cases:
        shape = AttentionShape(heads, kv_heads, 128, 128**-0.5)
        nbytes = sum(s + n for s, n in rows) * kv_heads * 128 * 2 * 2
        base = cut_for(shape, torch.bfloat16, len(rows), 132)
        few, tried = base.workers, [(base.workers, base.alone)]
        if tune:
            tried = [(n, alone) for n in sorted({few // 2, few, 2 * few, len(rows)}) for alone in (False, True)]
        for block_size in (16,) if tune else (16, 64):
            results = []
            for workers, alone in tried:
                step = Step(shape, rows, block_size, cut=Cut(workers, 64, base.tile, alone))
                choices = [(64, 4, 3), (64, 4, 4), (128, 4, 3), (128, 8, 3), (32, 4, 5), (64, 2, 4), (64, 2, 3)]
                seconds, choice = best(decode.TUNED, choices, lambda step=step: timed(step.run), tune)
                results.append((seconds, choice, (workers, alone)))
                del step
            seconds, choice, workers = min(results)
            report(f"decode {name}, blocks of {block_size}", seconds, nbytes, note=f"{choice} workers {workers}")
            if tune:
                print("   ", [(round(s * 1e6, 1), c, i) for s, c, i in results])


def bench_prefill(tune: bool) -> None:
    cases = [
        ("8 x 4096, 32/8", 32, 8, [(0, 4096)] * 8), ("8 x 4096, 16/8", 16, 8, [(0, 4096)] * 8),
        ("32 x 1024, 32/8", 32, 8, [(0, 1024)] * 32), ("2 x 16384, 32/8", 32, 8, [(0, 16384)] * 2),
        ("128 x 64 after 3072, 16/8", 16, 8, [(3072, 64)] * 128),
    ]  # fmt: skip
    choices = [
        (128, 64, 4, 3), (128, 64, 8, 3), (128, 64, 8, 4), (128, 128, 8, 3), (128, 128, 8, 2), (128, 32, 4, 4),
        (64, 64, 4, 3), (64, 128, 4, 3),
    ]  # fmt: skip
    for name, heads, kv_heads, rows in cases:
        shape = AttentionShape(heads, kv_heads, 128, 128**-0.5)
        flops = sum(4 * heads * 128 * n * (s + n / 2) for s, n in rows)
        for block_size, own in ((16, False), (64, False), (16, True)):

            def measure(shape=shape, rows=rows, block_size=block_size, own=own) -> float:
                step = Step(shape, rows, block_size)
                return timed(lambda: step.run(own), 3)

            seconds, choice = best(prefill.TUNED, choices, measure, tune, "own" if own else "half")
            what = "own tokens" if own else f"blocks of {block_size}"
            report(f"prefill {name}, {what}", seconds, flops=flops, note=str(choice))


def bench_prefix(tune: bool) -> None:
    for heads, kv_heads in ((16, 8), (32, 8)):
        shape = AttentionShape(heads, kv_heads, 128, 128**-0.5)
        rows = [(3072 + 64 + i % 64, 1) for i in range(256)]
        plain = Step(shape, rows, 16)
        nbytes = sum(s + n for s, n in rows) * kv_heads * 512
        report(f"256 rows of which 3072 shared, {heads}/{kv_heads}, plain", timed(plain.run), nbytes)
        nbytes = (3072 + sum(s + n - 3072 for s, n in rows)) * kv_heads * 512
        flops = 256 * 3072 * heads * 128 * 4
        choices = [(128, 64, 4, 3), (128, 64, 8, 3), (64, 64, 4, 3), (128, 32, 4, 4), (128, 128, 8, 3)]
        for splits in (4, 8) if tune else (triton_attention.PREFIX_SPLITS,):
            kept, triton_attention.PREFIX_SPLITS = triton_attention.PREFIX_SPLITS, splits
            step = Step(shape, rows, 16, shared=3072)
            seconds, choice = best(prefill.TUNED, choices, lambda step=step: timed(step.run), tune, "prefix")
            triton_attention.PREFIX_SPLITS = kept
            note = f"{choice} {splits} splits"
            report(f"  the prefix read once, {heads}/{kv_heads}", seconds, nbytes, flops, note=note)


def bench_small(tune: bool) -> None:
    for tokens in (1, 256, 8192):
        for size, mlp, heads, kv_heads in ((1024, 3072, 16, 8), (4096, 14336, 32, 8)):
            x = torch.randn(tokens, size, dtype=torch.bfloat16, device=DEVICE)
            w = torch.ones(size, dtype=torch.bfloat16, device=DEVICE)
            name = f"{tokens} tokens of {size}"
            report(f"rms_norm {name}", timed(lambda x=x, w=w: norm.rms_norm(x, w, 1e-6)), 4 * x.numel())
            g = torch.randn(tokens, 2 * mlp, dtype=torch.bfloat16, device=DEVICE)
            report(f"silu_and_mul {name}", timed(lambda g=g: norm.silu_and_mul(g)), 3 * g.numel())
            qkv = torch.randn(tokens, heads + 2 * kv_heads, 128, dtype=torch.bfloat16, device=DEVICE)
            table = torch.randn(8192, 128, dtype=torch.bfloat16, device=DEVICE)
            at = torch.arange(tokens, dtype=torch.int32, device=DEVICE)
            pool = torch.zeros(2, 600, kv_heads, 16, 128, dtype=torch.bfloat16, device=DEVICE)
            weights = torch.ones(heads + kv_heads, 128, dtype=torch.bfloat16, device=DEVICE)
            seconds = timed(
                lambda qkv=qkv, weights=weights, table=table, at=at, pool=pool: rope.norm_rotate_write(
                    qkv, rope.Turning((weights, 1e-6), table), at, at, pool[0], pool[1]
                )
            )
            report(f"norm_rotate_write {name}", seconds, 4 * qkv.numel())
    step = Step(AttentionShape(16, 8, 128, 0.1), [(1024, 1)] * 256, 16)
    report("begin, 256 rows", timed(step.begin), 1)


def bench_sample(tune: bool) -> None:
    for count in (1, 32, 256, 1024):
        logits = torch.randn(count, 151936, dtype=torch.bfloat16, device=DEVICE) * 3
        step = StepTables(count, 1, 1, 1, 1, DEVICE)
        step.meta[6] = count
        step.samples_3R[1] = torch.arange(1, count + 1, device=DEVICE)
        params = torch.zeros((count + 1, PARAM_WORDS), dtype=torch.int32, device=DEVICE)
        params[:, 3] = 50
        last, out = (torch.zeros(count + 1, dtype=kind, device=DEVICE) for kind in (torch.int64, torch.int32))
        for name, heat, filters in (("greedy", 0.0, False), ("temperature", 0.7, False), ("filters", 0.7, True)):
            params[:, 4:7] = torch.tensor([heat, 0.9, 0.05]).view(torch.int32).to(DEVICE)
            seconds = timed(
                lambda logits=logits, step=step, params=params, last=last, out=out, filters=filters: sample.sample(
                    logits, step, params, last, out, 1.0, 0.0, filters
                )
            )
            report(f"sample {count} x 151936, {name}", seconds, 2 * logits.numel())


FEW = [(held << 10, most, warps) for held, most, warps in (
    (8, 4096, 4), (16, 1024, 4), (16, 2048, 4), (16, 4096, 4), (32, 1024, 4), (32, 2048, 4), (32, 4096, 4),
    (32, 1024, 8), (32, 4096, 8), (64, 1024, 8), (64, 4096, 8), (64, 4096, 16),
)]  # fmt: skip


def bench_linear(tune: bool) -> None:
    """The products of a layer with what lies around them: the library and other kernels, and one kernel for all."""
    for size, mlp, q, kv in ((1024, 3072, 2048, 1024), (4096, 14336, 4096, 1024)):
        weight_I = torch.ones(size, dtype=torch.bfloat16, device=DEVICE)
        products = (
            ("qkv", q + 2 * kv, size, (weight_I, 1e-6)), ("o", size, q, None),
            ("gate_up", 2 * mlp, size, (weight_I, 1e-6)), ("down", size, mlp, None),
        )  # fmt: skip
        for name, outputs, inputs, normed in products:
            copies = max(2, int(300e6 // (outputs * inputs * 2)) + 1)
            weights = [torch.randn(outputs, inputs, dtype=torch.bfloat16, device=DEVICE) for _ in range(copies)]
            for m in (1, 2, 4):
                x = torch.randn(m, inputs, dtype=torch.bfloat16, device=DEVICE)
                r = torch.randn(m, outputs, dtype=torch.bfloat16, device=DEVICE)
                gated = name == "gate_up"

                def library(x=x, r=r, gated=gated, normed=normed, weights=weights) -> None:
                    for w in weights:
                        if normed is None:
                            r.addmm_(x, w.t())
                        else:
                            y = torch.nn.functional.linear(norm.rms_norm(x, *normed), w)
                            if gated:
                                norm.silu_and_mul(y)

                nbytes = 2 * outputs * inputs
                report(f"{name} {m} x {outputs} x {inputs}, library", timed(library, 1) / copies, nbytes)
                results = []
                for tuned in FEW if tune else [None]:

                    def few(x=x, r=r, gated=gated, normed=normed, tuned=tuned, weights=weights) -> None:
                        for w in weights:
                            linear.multiply(x, w, None, r if normed is None else None, gated, normed, tuned)

                    results.append((timed(few, 1) / copies, str(tuned)))
                for seconds, launch in sorted(results)[:5]:
                    report(f"{name} {m} x {outputs} x {inputs}, one kernel", seconds, nbytes, note=launch)


def bench_buckets(tune: bool) -> None:
    """The library's products at the numbers of rows that graphs are captured for."""
    for n, k in ((4096, 1024), (6144, 1024), (28672, 4096), (4096, 14336), (6144, 4096)):
        weights = [
            torch.randn(n, k, dtype=torch.bfloat16, device=DEVICE) for _ in range(max(2, int(3e8 / (n * k * 2))))
        ]
        line = []
        for m in (24, 32, 48, 56, 64, 72, 80, 96, 104, 112, 128, 136, 144, 160, 176, 192, 208, 224, 240, 256):
            x = torch.randn(m, k, dtype=torch.bfloat16, device=DEVICE)

            def call(x=x, weights=weights) -> None:
                for w in weights:
                    torch.nn.functional.linear(x, w)

            line.append(f"{m}:{timed(call, 1) / len(weights) * 1e6:.1f}")
        print(f"buckets {n} x {k} us", *line, flush=True)


BENCHES = {
    "buckets": bench_buckets,
    "decode": bench_decode, "prefill": bench_prefill, "prefix": bench_prefix, "small": bench_small,
    "sample": bench_sample, "linear": bench_linear,
}  # fmt: skip

if __name__ == "__main__":
    torch.manual_seed(0)
    replay.Slice.from_command_line()
    names = sys.argv[2].split(",") if len(sys.argv) > 2 else list(BENCHES)
    for bench in names:
        with torch.inference_mode():
            BENCHES[bench]("--tune" in sys.argv)
        torch.cuda.empty_cache()
    with open(sys.argv[1], "w") as file:
        json.dump(OUT, file, indent=1)
