// Vectors of 16 lanes for each instruction set, with one interface.
//
// F: 16 float32. I: 16 int32. B: 64 bytes, read as 16 lanes of four bytes or of two bfloat16. Kernels are written
// once on top of this file; it is compiled in a namespace of its own per instruction set (OCTAVO_ISA), so that no
// inline function of one set can be linked into another.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define OCTAVO_INLINE static inline __attribute__((always_inline))
#define OCTAVO_METHOD static __attribute__((always_inline))

namespace octavo::OCTAVO_ISA {

constexpr int kLanes = 16;

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#include "simd_avx512.inc"
#elif defined(__AVX2__)
#include "simd_avx2.inc"
#else
#include "simd_portable.inc"
#endif

OCTAVO_INLINE F fzero() { return fset(0.0f); }

// 2^x for x up to 127: relative error below 3e-7; below -126 it stays at 2^-126.
OCTAVO_INLINE F exp2(F x) {
    x = fmax(x, fset(-126.0f));
    F whole = round_to_even(x), f = fsub(x, whole);
    // Taylor coefficients of 2^f = exp(f ln 2) on [-0.5, 0.5].
    F p = fset(1.5252734e-5f);
    p = fma(p, f, fset(1.5403530e-4f));
    p = fma(p, f, fset(1.3333558e-3f));
    p = fma(p, f, fset(9.6181291e-3f));
    p = fma(p, f, fset(5.5504109e-2f));
    p = fma(p, f, fset(2.4022651e-1f));
    p = fma(p, f, fset(6.9314718e-1f));
    p = fma(p, f, fset(1.0f));
    return times_power(p, whole);
}

// The same to a relative error of 4e-6, without a lower limit where the instruction set has none.
OCTAVO_INLINE F exp2_short(F x) {
    x = keep_above_126(x);
    F whole = round_to_even(x), f = fsub(x, whole);
    // Minimax coefficients of 2^f on [-0.5, 0.5].
    F p = fset(9.5701e-3f);
    p = fma(p, f, fset(5.591786e-2f));
    p = fma(p, f, fset(2.4024745e-1f));
    p = fma(p, f, fset(6.9312181e-1f));
    p = fma(p, f, fset(1.0f));
    return times_power(p, whole);
}

constexpr float kLog2e = 1.44269504088896341f;
constexpr float kLn2 = 0.69314718055994531f;

OCTAVO_INLINE F exp(F x) { return exp2(fmul(fmin(x, fset(88.0f)), fset(kLog2e))); }

// Natural logarithm of normal positive numbers, absolute error below 1e-6 times max(1, |result|).
OCTAVO_INLINE F log(F x) {
    I bits = as_int(x);
    // Mantissa in [sqrt(1/2), sqrt(2)).
    I shifted = isub(bits, iset(0x3f3504f3));
    F e = to_float(isra<23>(shifted));
    F m = as_float(iadd(iand(shifted, iset(0x007fffff)), iset(0x3f3504f3)));
    F t = fdiv(fsub(m, fset(1.0f)), fadd(m, fset(1.0f)));
    F t2 = fmul(t, t);
    // log m = 2 atanh t = 2 (t + t^3/3 + t^5/5 + ...), |t| < 0.172.
    F p = fset(2.0f / 9.0f);
    p = fma(p, t2, fset(2.0f / 7.0f));
    p = fma(p, t2, fset(2.0f / 5.0f));
    p = fma(p, t2, fset(2.0f / 3.0f));
    p = fma(p, t2, fset(2.0f));
    return fma(e, fset(kLn2), fmul(p, t));
}

// x * sigmoid(x)
OCTAVO_INLINE F silu(F x) { return fmul(x, reciprocal(fadd(fset(1.0f), exp(fsub(fzero(), x))))); }

// tanh by way of exp(-2|x|), odd by construction.
OCTAVO_INLINE F tanh(F x) {
    F e = exp(fmul(fabs(x), fset(-2.0f)));
    F t = fmul(fsub(fset(1.0f), e), reciprocal(fadd(fset(1.0f), e)));
    return as_float(ior(iand(as_int(x), iset(static_cast<int>(0x80000000u))), as_int(t)));
}

// The tanh form of GELU.
OCTAVO_INLINE F gelu(F x) {
    F inner = fmul(fset(0.79788456080286536f), fma(fmul(fset(0.044715f), fmul(x, x)), x, x));
    return fmul(fmul(fset(0.5f), x), fadd(fset(1.0f), tanh(inner)));
}

}  // namespace octavo::OCTAVO_ISA
