"""Products of few tokens with 4- and 8-bit weights, which are streamed once and widened in registers.

The weight is the left operand of the tensor cores' product, straight from registers, and the tokens are the right
one, so that one token costs little more than the memory traffic. A 4-bit code becomes a 16-bit float without any
conversion: put into the low bits of a float's significand it adds to that float (128 + code in bfloat16, 1024 + code
in float16), from which that and the zero are subtracted; an 8-bit one goes through float32 in the same way. Scales
are applied to the sums of their group. As in `octavo.kernels.gpu.linear`, the inputs of an output can be shared out
over SPLIT programs, of which the last to finish adds the parts in their order.

Shape letters: T tokens, I inputs, O outputs, B blocks of inputs, W words of a block, G groups of a block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.gpu.launch import early, in_turn
from octavo.kernels.quant import IMPLIED_ZERO, Kind, QuantWeight, unpack_int4

_CHUNK = 2048  # rows that are repacked at a time


@dataclass(frozen=True, eq=False)
class Packed:
    """A `QuantWeight` as the kernels read it: codes in words of 32 bits, in blocks of `block` inputs.

    Column block * b + W s + j of a row is field s (of 4 or 8 bits, the lowest first) of word j of block b, W being
    the words of a block. int4: words_BOW, so that a tile of outputs is contiguous in each block. int8 and fp8: words
    [O, B * W], a row after the other, with 4 W = 128; int8 has 128 added. Scales and zeros are [B, O, G] with one for
    each of the `groups` of a block ([O / 128, B] for FP8 in 128 x 128), or [O], then `groups` is 0.
    """

    kind: Kind
    shape: tuple[int, int]
    words: Tensor
    scales: Tensor
    zeros: Tensor | None
    block: int
    groups: int
    rows: int
    order_I: Tensor | None
    input_scale: Tensor | None
    one: Tensor
    """float32 1.0 on the device, a scale that changes nothing"""

    @property
    def blocks(self) -> int:
        """Blocks of inputs; the last may be ragged."""
        return -(-self.shape[1] // self.block)


def can_pack(weight: QuantWeight) -> bool:
    """Whether the kernels here read it: groups of 32, 64 or 128 columns, or one a row; FP8 also in 128 x 128."""
    whole = weight.columns >= weight.shape[1]
    if weight.kind == "fp8":
        return (whole and weight.rows == 1) or (weight.rows, weight.columns) == (128, 128)
    return weight.rows == 1 and (whole or weight.columns in (32, 64, 128))


def pack(weight: QuantWeight) -> Packed:
    """Repack once, when the model is built."""
    inputs = weight.shape[1]
    whole = weight.columns >= inputs and weight.rows == 1
    wide = weight.kind == "int4" and inputs % 256 == 0 and (whole or weight.columns in (64, 128))
    block = 256 if wide else 128
    groups = 0 if whole else block // weight.columns
    zeros = None if weight.zeros_RG is None else _by_block(weight.zeros_RG, groups)
    words = _nibbles(weight.codes, inputs, block) if weight.kind == "int4" else _bytes(weight)
    scales = _by_block(weight.scales_RG, groups) if weight.rows == 1 else weight.scales_RG.contiguous()
    return Packed(
        weight.kind, weight.shape, words, scales, zeros, block, groups, weight.rows, weight.order_I,
        weight.input_scale, torch.ones((), device=words.device),
    )  # fmt: skip


def _nibbles(codes: Tensor, inputs: int, block: int) -> Tensor:
    outputs, blocks = codes.shape[0], -(-inputs // block)
    words_BOW = torch.empty((blocks, outputs, block // 8), dtype=torch.int32, device=codes.device)
    for at in range(0, outputs, _CHUNK):
        fields = unpack_int4(codes[at : at + _CHUNK]).to(torch.int32)
        fields = torch.nn.functional.pad(fields, (0, blocks * block - inputs)).view(-1, blocks, 8, block // 8)
        words = fields[:, :, 0].clone()
        for s in range(1, 8):
            words |= fields[:, :, s] << 4 * s
        words_BOW[:, at : at + _CHUNK] = words.transpose(0, 1)
    return words_BOW


def _bytes(weight: QuantWeight) -> Tensor:
    outputs, inputs = weight.shape
    blocks = -(-inputs // 128)
    words_OI = torch.empty((outputs, blocks * 32), dtype=torch.int32, device=weight.device)
    for at in range(0, outputs, _CHUNK):
        fields = weight.codes[at : at + _CHUNK].view(torch.uint8)
        if weight.kind == "int8":
            fields = fields ^ 128
        fields = torch.nn.functional.pad(fields, (0, blocks * 128 - inputs)).view(-1, blocks, 4, 32)
        words_OI[at : at + _CHUNK] = fields.transpose(2, 3).reshape(len(fields), -1).view(torch.int32)
    return words_OI


def _by_block(values_RG: Tensor, groups: int) -> Tensor:
    if not groups:
        return values_RG.reshape(-1).contiguous()
    rows, count = values_RG.shape
    padded = torch.nn.functional.pad(values_RG, (0, -count % groups))
    return padded.view(rows, -1, groups).transpose(0, 1).contiguous()


@triton.constexpr_function
def _nibble_code(s: int, half: bool, raw: bool) -> str:
    """PTX for two codes of slice s from words $1 and $2, plus 128 (1024), or less $3: their zeros plus that."""
    bits = "f16x2" if half else "bf16x2"
    halves = "0x5410" if s < 4 else "0x7632"
    shift = f"shr.u32 t, t, {4 * (s % 4)};" if s % 4 else ""
    unit = "0x64006400" if half else "0x43004300"
    words = "{ .reg .b32 t; prmt.b32 t, $1, $2, " + halves + "; " + shift
    if raw:
        return words + " lop3.b32 $0, t, 0x000F000F, " + unit + ", 0xEA; }"
    return words + " lop3.b32 t, t, 0x000F000F, " + unit + ", 0xEA; sub.rn." + bits + " $0, t, $3; }"


@triton.constexpr_function
def _byte_code(s: int, half: bool) -> str:
    """PTX for bytes s of words $1 and $2, less $3 and $4: their zeros, to which 2^23 + 128 has been added."""
    kind = "f16x2" if half else "bf16x2"
    return (
        "{ .reg .b32 a, b; prmt.b32 a, $1, 0x4B000000, 0x765" + str(s) + "; sub.f32 a, a, $3; "
        "prmt.b32 b, $2, 0x4B000000, 0x765" + str(s) + "; sub.f32 b, b, $4; cvt.rn." + kind + ".f32 $0, b, a; }"
    )


@triton.constexpr_function
def _float_code(s: int, half: bool) -> str:
    """PTX for e4m3 bytes s of words $1 and $2: their bits are those of a bfloat16 that is 2^120 times too small."""
    if half:
        pick = "prmt.b32 t, $1, $2, 0x00" + str(4 + s) + str(s)
        return "{ .reg .b32 t; .reg .b16 l, h; " + pick + "; mov.b32 {l, h}, t; cvt.rn.f16x2.e4m3x2 $0, l; }"
    return (
        "{ .reg .b32 t, u, m; prmt.b32 t, $1, $2, 0x" + str(4 + s) + "0" + str(s) + "0; shr.u32 u, t, 4; "
        "and.b32 u, u, 0x07F007F0; lop3.b32 t, t, 0x80008000, u, 0xEA; mov.b32 m, 0x7B807B80; "
        "mul.rn.bf16x2 $0, t, m; }"
    )


@triton.jit
def widened(
    p, zero, S: tl.constexpr, KIND: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr, RAW: tl.constexpr
):  # fmt: skip
    """Fields S of the words p, less `zero` (float32 [:, 1]), in the dtype of the tokens; RAW: plus 128 or 1024."""
    half: tl.constexpr = DTYPE == tl.float16
    kind = tl.float16 if half else tl.bfloat16
    if ASM and RAW:
        w = tl.inline_asm_elementwise(_nibble_code(S, half, True), "=r,r,r", [p], kind, is_pure=True, pack=2)
    elif ASM and KIND == "int4":
        z = tl.broadcast_to((zero + (1024.0 if half else 128.0)).to(DTYPE), p.shape)
        w = tl.inline_asm_elementwise(_nibble_code(S, half, False), "=r,r,r,r", [p, z], kind, is_pure=True, pack=2)
    elif ASM and KIND == "int8":
        z = tl.broadcast_to(zero + 8388736.0, p.shape)
        w = tl.inline_asm_elementwise(_byte_code(S, half), "=r,r,r,f,f", [p, z], kind, is_pure=True, pack=2)
    elif ASM:
        w = tl.inline_asm_elementwise(_float_code(S, half), "=r,r,r", [p], kind, is_pure=True, pack=2)
    elif KIND == "int4":
        w = (((p >> 4 * S) & 15).to(tl.float32) + (128.0 - zero * 0.0 if RAW else -zero)).to(DTYPE)
    elif KIND == "int8":
        w = (((p >> 8 * S) & 255).to(tl.float32) - 128.0 - zero).to(DTYPE)
    else:
        bits = p >> 8 * S
        bits = ((bits & 0x80) << 24) | ((bits & 0x7F) << 20)
        w = (bits.to(tl.float32, bitcast=True) * 1.329227995784916e36).to(DTYPE)
    return w


@triton.jit
def _tile(WORDS, u, n, ok, rows, width, W: tl.constexpr, KIND: tl.constexpr, EVEN: tl.constexpr):
    """Words of rows `n` in block u of a matrix of `rows` rows of `width` words."""
    if KIND == "int4":
        at = (u * rows + n).to(tl.int64) * W
    else:
        at = n.to(tl.int64) * width + u * W
    at = at[:, None] + tl.arange(0, W)[None, :]
    if EVEN:
        p = tl.load(WORDS + at, eviction_policy="evict_first")
    else:
        p = tl.load(WORDS + at, mask=ok[:, None], other=0, eviction_policy="evict_first")
    return p


@triton.jit
def _facts(VALUES, u, n, ok, rows, blocks, NG: tl.constexpr, ROWS: tl.constexpr, EVEN: tl.constexpr):
    """Scales or zeros [n, NG] of block u."""
    if ROWS > 1:
        at = (n // ROWS * blocks + u)[:, None] + tl.arange(0, NG)[None, :]
    else:
        at = (u * rows + n)[:, None] * NG + tl.arange(0, NG)[None, :]
    if EVEN:
        x = tl.load(VALUES + at)
    else:
        x = tl.load(VALUES + at, mask=ok[:, None], other=0)
    return x


@triton.jit
def _column(x, AT: tl.constexpr, NG: tl.constexpr):
    """Column AT of the NG columns, as float32 [:, 1]."""
    if NG == 4:
        even, odd = tl.split(tl.reshape(x, [x.shape[0], 2, 2]))
        low, high = tl.split(even if AT % 2 == 0 else odd)
        y = low if AT < 2 else high
    elif NG == 2:
        low, high = tl.split(x)
        y = low if AT == 0 else high
    else:
        y = tl.reshape(x, [x.shape[0]])
    return y.to(tl.float32)[:, None]


@triton.jit
def sum_parts(acc, PART, COUNT, m, T, BN: tl.constexpr, MB: tl.constexpr, SPLIT: tl.constexpr):
    """Leave a part; the program that comes last gets the sum of all parts, the others a count below SPLIT - 1."""
    tile = tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
    at = tl.arange(0, BN)[:, None] * MB + tl.arange(0, MB)[None, :]
    ok = (m < T)[None, :] & (at >= 0)
    place = PART + tile * SPLIT * BN * MB + at
    tl.store(place + tl.program_id(1) * BN * MB, acc, mask=ok)
    tl.debug_barrier()
    before = tl.atomic_add(COUNT + tile, 1, sem="acq_rel")
    if before == SPLIT - 1:
        acc = acc * 0.0
        for s in tl.static_range(SPLIT):
            acc += tl.load(place + s * BN * MB, mask=ok, other=0.0, cache_modifier=".cg")
        tl.store(COUNT + tile, 0)
    return acc, before


@triton.jit
def finished(
    acc, BIAS, OUT, n, m, T, N, BN: tl.constexpr, MB: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr,
    BIASED: tl.constexpr,
):  # fmt: skip
    """What follows the product: bias, gate, sum with what is there, store."""
    if GATED:
        n = tl.program_id(0) * (BN // 2) + tl.arange(0, BN // 2)
        acc, up = tl.split(tl.permute(tl.reshape(acc, [2, BN // 2, MB]), (1, 2, 0)))
        if BIASED:
            up += tl.load(BIAS + N + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    if BIASED:
        acc += tl.load(BIAS + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    if GATED:
        acc = acc / (1.0 + tl.exp(-acc)) * up
    at = m.to(tl.int64)[None, :] * N + n[:, None]
    ok = (m < T)[None, :] & (n < N)[:, None]
    if ADD:
        acc += tl.load(OUT + at, mask=ok, other=0.0).to(tl.float32)
    tl.store(OUT + at, acc.to(OUT.dtype.element_ty), mask=ok)


@triton.jit
def _multiply(
    p, acc, total, X, m, T, KI, u, scales, zeros, zero,
    KIND: tl.constexpr, SLICES: tl.constexpr, W: tl.constexpr, NG: tl.constexpr, ZEROED: tl.constexpr,
    EVEN: tl.constexpr, ASM: tl.constexpr, RAW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add block u of the product; `total` is the sum of tokens over the group that is not finished."""
    DTYPE: tl.constexpr = X.dtype.element_ty
    LONG: tl.constexpr = SLICES // NG if NG > 0 else SLICES  # slices of a group
    part = tl.zeros(acc.shape, tl.float32)
    for s in tl.static_range(SLICES):
        k = (u * SLICES + s) * W + tl.arange(0, W)
        x = tl.load(
            X + m.to(tl.int64)[None, :] * KI + k[:, None], mask=(m < T)[None, :] & (EVEN or (k < KI)[:, None]),
            other=0.0,
        )  # fmt: skip
        if RAW:
            total = tl.dot(tl.full(p.shape, 1.0, DTYPE), x, total, input_precision=PRECISION)
        if NG == 0:
            acc = tl.dot(widened(p, zero, s, KIND, DTYPE, ASM, RAW), x, acc, input_precision=PRECISION)
        else:
            z = _column(zeros, s // LONG, NG) if ZEROED else zero
            part = tl.dot(widened(p, z, s, KIND, DTYPE, ASM, RAW), x, part, input_precision=PRECISION)
            if s % LONG == LONG - 1:
                if RAW:
                    part -= total * (z + above(DTYPE, ASM))
                    total = tl.zeros(acc.shape, tl.float32)
                acc += part * _column(scales, s // LONG, NG)
                part = tl.zeros(acc.shape, tl.float32)
    return acc, total


@triton.constexpr_function
def above(dtype: tl.dtype, asm: bool) -> float:
    """What RAW fields hold beside the code."""
    return 1024.0 if asm and dtype == tl.float16 else 128.0


@triton.jit(do_not_specialize=["T"])
def products(
    X, WORDS, SCALES, ZEROS, BIAS, OUT, PART, COUNT, T, N, KI, width, blocks, per,
    KIND: tl.constexpr, IMPLIED: tl.constexpr, MB: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    NG: tl.constexpr, ROWS: tl.constexpr, SPLIT: tl.constexpr, ZEROED: tl.constexpr, EVEN: tl.constexpr,
    GATED: tl.constexpr, ADD: tl.constexpr, BIASED: tl.constexpr, ASM: tl.constexpr, RAW: tl.constexpr,
    PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A tile of outputs for a tile of tokens, of blocks per * s to per * (s + 1) of inputs for part s of SPLIT."""
    SLICES: tl.constexpr = 8 if KIND == "int4" else 4
    W: tl.constexpr = BK // SLICES
    r = tl.arange(0, BN)
    m = tl.program_id(2) * MB + tl.arange(0, MB)
    rows = N
    n = tl.program_id(0) * BN + r
    ok = n < N
    if GATED:  # a tile is half gate, half up
        rows = N * 2
        n = tl.program_id(0) * (BN // 2) + r % (BN // 2)
        ok = n < N
        n += r // (BN // 2) * N
    lo = tl.program_id(1) * per
    hi = tl.minimum(lo + per, blocks)
    acc = tl.zeros([BN, MB], tl.float32)
    total = tl.zeros([BN, MB], tl.float32)
    zero = tl.full([BN, 1], IMPLIED, tl.float32)
    if NG == 0 and ZEROED:
        zero = _column(_facts(ZEROS, 0, n, ok, rows, blocks, 1, 1, EVEN), 0, 1)
    scales = _facts(SCALES, lo, n, ok, rows, blocks, NG, ROWS, EVEN) if NG > 0 else zero
    zeros = _facts(ZEROS, lo, n, ok, rows, blocks, NG, 1, EVEN) if NG > 0 and ZEROED else zero
    in_turn(EARLY)
    for u in range(lo, hi):
        p = _tile(WORDS, u, n, ok, rows, width, W, KIND, EVEN)
        scales_now = scales
        zeros_now = zeros
        if NG > 0:  # those of the next block are on their way while this one is multiplied
            v = tl.minimum(u + 1, hi - 1)
            scales = _facts(SCALES, v, n, ok, rows, blocks, NG, ROWS, EVEN)
            zeros = _facts(ZEROS, v, n, ok, rows, blocks, NG, 1, EVEN) if ZEROED else zeros
        acc, total = _multiply(
            p, acc, total, X, m, T, KI, u, scales_now, zeros_now, zero, KIND, SLICES, W, NG, ZEROED, EVEN, ASM, RAW,
            PRECISION,
        )  # fmt: skip
    if NG == 0:
        if RAW:
            acc -= total * (zero + above(X.dtype.element_ty, ASM))
        acc *= tl.load(SCALES + n, mask=ok, other=0.0).to(tl.float32)[:, None]
    last = SPLIT - 1
    if SPLIT > 1:
        acc, last = sum_parts(acc, PART, COUNT, m, T, BN, MB, SPLIT)
    if last == SPLIT - 1:
        finished(acc, BIAS, OUT, n, m, T, N, BN, MB, GATED, ADD, BIASED)


@triton.jit
def _widen(
    WORDS, SCALES, ZEROS, OUT, rows, KI, width, blocks, KIND: tl.constexpr, IMPLIED: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, NG: tl.constexpr, ROWS: tl.constexpr, ZEROED: tl.constexpr, ASM: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    in_turn(EARLY)
    SLICES: tl.constexpr = 8 if KIND == "int4" else 4
    W: tl.constexpr = BK // SLICES
    COLUMNS: tl.constexpr = NG if NG > 0 else 1
    LONG: tl.constexpr = SLICES // COLUMNS
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    u = tl.program_id(1)
    ok = n < rows
    p = _tile(WORDS, u, n, ok, rows, width, W, KIND, False)
    group = u if NG > 0 else 0
    scales = _facts(SCALES, group, n, ok, rows, blocks, COLUMNS, ROWS, False)
    zeros = _facts(ZEROS, group, n, ok, rows, blocks, COLUMNS, 1, False) if ZEROED else scales
    for s in tl.static_range(SLICES):
        z = _column(zeros, s // LONG, COLUMNS) if ZEROED else tl.full([BN, 1], IMPLIED, tl.float32)
        w = widened(p, z, s, KIND, OUT.dtype.element_ty, ASM, False).to(tl.float32) * _column(
            scales, s // LONG, COLUMNS
        )
        k = u * BK + s * W + tl.arange(0, W)
        at = n.to(tl.int64)[:, None] * KI + k[None, :]
        tl.store(OUT + at, w.to(OUT.dtype.element_ty), mask=ok[:, None] & (k < KI)[None, :])


def widen(packed: Packed, dtype: torch.dtype) -> Tensor:
    """The weight [O, I] in bfloat16 or float16, columns as they lie in its codes, for a product of many tokens."""
    outputs, inputs = packed.shape
    out_OI = torch.empty((outputs, inputs), dtype=dtype, device=packed.words.device)
    _widen[(triton.cdiv(outputs, 64), packed.blocks)](
        packed.words, packed.scales, packed.words if packed.zeros is None else packed.zeros, out_OI, outputs, inputs,
        packed.words.shape[-1], packed.blocks, packed.kind, float(IMPLIED_ZERO[packed.kind]), 64, packed.block,
        packed.groups, packed.rows, packed.zeros is not None,
        not triton.knobs.runtime.interpret and dtype != torch.float32, early(out_OI), num_warps=4,
        launch_pdl=early(out_OI),
    )  # fmt: skip
    return out_OI
