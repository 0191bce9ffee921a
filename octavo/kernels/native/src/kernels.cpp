// The kernels of one instruction set: compiled once per set with OCTAVO_ISA naming it.
//
// No standard library templates here: their inline functions would be compiled for this set and could be linked into
// code that runs on machines without it.
#include "kernels.h"
#include "simd.h"

namespace octavo::OCTAVO_ISA {

constexpr int kMaxHeadDim = 256;
constexpr float kNever = -3.0e38f;   // below every score and logit, and finite

#include "rows.inc"
#include "product.inc"
#include "attention.inc"
#include "sampling.inc"

extern const Kernels kKernels;
const Kernels kKernels = {
    OCTAVO_NAME,
    {product<Format::Q4>, product<Format::Q4M>, product<Format::Q5>, product<Format::Q5M>, product<Format::Q6>,
     product<Format::Q8>, product<Format::BF16>, product<Format::F32>, product<Format::G4>, product<Format::G4Z>,
     product<Format::G8>, product<Format::G8Z>},
    norm,
    convert,
    token_heads,
    attend,
    finish_logits,
    sample,
    log_sum_exp,
    count_greater,
    sizeof(State<FloatType>),
};

}  // namespace octavo::OCTAVO_ISA
