#include <cstring>

#include "kernels.h"

namespace octavo {

#define OCTAVO_DECLARE(isa) namespace isa { extern const Kernels kKernels; }
OCTAVO_DECLARE(portable)
#if defined(OCTAVO_X86)
OCTAVO_DECLARE(avx2)
OCTAVO_DECLARE(avx512)
OCTAVO_DECLARE(avx512bf16)
#endif

namespace {

struct Candidate {
    const Kernels* kernels;
    bool runs;
};

}  // namespace

const Kernels* find_kernels(const char* name) {
#if defined(OCTAVO_X86)
    __builtin_cpu_init();
    bool v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    bool v4 = v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
              __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
              __builtin_cpu_supports("avx512vnni");
    const Candidate candidates[] = {{&avx512bf16::kKernels, v4 && __builtin_cpu_supports("avx512bf16")},
                                    {&avx512::kKernels, v4},
                                    {&avx2::kKernels, v3},
                                    {&portable::kKernels, true}};
#else
    const Candidate candidates[] = {{&portable::kKernels, true}};
#endif
    for (const Candidate& c : candidates)
        if (c.runs && (!*name || !std::strcmp(name, c.kernels->name))) return c.kernels;
    return nullptr;
}

}  // namespace octavo
