// Single kernels behind plain arrays, for tests and benchmarks.
#pragma once

#include <string>

#include "weights.h"

namespace octavo {

// out [m, rows] = x [m, columns] . weights^T
void probe_product(const std::string& isa, const PackJob& job, const float* x, int m, float* out);
// out [rows, columns]: the packed weights read back.
void probe_unpack(const PackJob& job, float* out);

struct Probe {
    int heads, kv_heads, head_dim, block_size, blocks, window;
    float scale, softcap;
    KvKind kv;
};
// Writes k and v of all positions of each row through its table, then attends with the last `length` tokens of each
// row, one task per row and KV head. k, v: rows one after the other, [start + length, kv_heads, head_dim] each; q and
// out: [length, heads, head_dim] each.
void probe_attention(const std::string& isa, const Probe& probe, const int32_t* start, const int32_t* length, int rows,
                     const int32_t* tables, int table_columns, const float* q, const float* k, const float* v, float* out);

int probe_sample(const std::string& isa, const float* logits, int vocab, const int32_t* params, int position);

// Seconds of one product with m rows of activations, the best of `repeats`; `copies` copies of the packed weights take
// turns, so that they come from memory when together they are larger than the caches.
double time_product(const std::string& isa, const PackJob& job, int m, int copies, int threads, int repeats);

}  // namespace octavo
