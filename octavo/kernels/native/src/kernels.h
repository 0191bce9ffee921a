// What the kernels of one instruction set offer, and the data they share with the rest of the engine.
//
// Sizes: a panel is 32 rows of a weight matrix; every vector of activations is padded with zeros to a multiple of 32.
// All results are independent of how many rows are worked on together, so a token's numbers do not depend on the
// other tokens of its step.
#pragma once

#include <cstddef>
#include <cstdint>

namespace octavo {

constexpr int kPanel = 32;     // rows of a weight panel
constexpr int kBlock = 32;     // columns of a weight or activation block
constexpr int kTile = 16;      // keys of a tile of the KV pool
constexpr int kSegment = 64;   // keys that attention works on at a time: four tiles
constexpr int kMaxQueries = 48;  // queries of one attention task

inline int pad_to(int n, int multiple) { return (n + multiple - 1) / multiple * multiple; }

// How a packed weight block (32 rows x 32 columns) lies; see weights.h.
enum class Format : int { Q4, Q4M, Q5, Q5M, Q6, Q8, BF16, F32, G4, G4Z, G8, G8Z };
constexpr int kFormats = 12;

// Forms of activations that products read; a bit set says which ones are wanted.
enum Form : int { kInt8 = 1, kBf16 = 2, kFloat = 4 };
inline int form_of(Format f) { return f == Format::BF16 ? kBf16 : f == Format::F32 ? kFloat : kInt8; }

// Facts about 32 activations x = scale * q: sum = scale * (sum of q), negative = -(sum of q), negative0 = the same of
// the first 16.
struct ActBlock {
    float scale, sum;
    int32_t negative, negative0;
};

// Rows of activations in the forms that the next product reads; `stride` elements a row, stride / 32 blocks.
struct Acts {
    int8_t* q;
    ActBlock* blocks;
    uint16_t* bf16;
    float* f32;
    size_t stride;
};

enum class Epilogue : int {
    Store,     // out = y
    Add,       // out += scale * y
    GateSilu,  // rows 0..15 of a panel are gates, 16..31 values: out[16 p + i] = silu(gate) * value
    GateGelu,
};

// out[m, column0 + n] for rows m0 <= m < m1 and panels p0 <= p < p1, with y = activations . weights^T + bias.
struct Product {
    const uint8_t* weights;  // first panel
    size_t panel_bytes;
    int columns;  // padded to 32
    int group;    // columns that share a scale, a multiple of 32; for G formats
    Acts acts;
    int m0, m1, p0, p1;
    int last;     // end of the panels that this thread is going to use
    const float* bias;  // padded, may be null
    float* out;
    size_t out_stride;
    int column0;
    Epilogue epilogue;
    float scale;
};

enum class KvKind : int { F32, BF16, I8 };

// The KV pool as one layer sees it: its part of a block is contiguous, `stride` bytes from block to block. A tile holds 16 keys of one head: the K part, the V part, and for I8 16 scales of K and 16
// of V. K is transposed: step s of a tile is one vector with elements 2s, 2s+1 of 16 keys (F32: element s). V has one
// row of vectors per two keys (F32: per key), each lane holding one element of both.
struct KvShape {
    KvKind kind;
    int head_dim, kv_heads, block_size, tiles_per_block;
    size_t part_bytes, tile_bytes, head_bytes, block_bytes, stride;
};

inline uint8_t* tile_at(uint8_t* layer, const KvShape& s, int block, int head, int tile) {
    return layer + static_cast<size_t>(block) * s.stride + head * s.head_bytes + tile * s.tile_bytes;
}

// One token between the qkv product and attention: norms of q and k heads, rotation, q rounded to the type attention
// works in, k and v written to the pool.
struct TokenHeads {
    const float *q, *k, *v;          // heads side by side
    const float *q_norm, *k_norm;    // weights of head_dim, may be null
    float eps;
    int heads, rotary;               // rotary: rotated elements of a head
    const float *cos, *sin;          // rotary / 2 each
    void* q_out;                     // heads x head_dim, float32 or bfloat16
    uint8_t* layer;
    int block, offset;
    bool last;                       // of its row: what lies behind it in the pool is not valid
};

// Tokens of one row that attend together.
struct Span {
    const int32_t* table;  // blocks of the row
    int token, tokens;     // first token of the step, count
    int position;          // of the first token
};

// Queries of `count` spans over one KV head. The keys of the first `shared` segments are the same for all spans.
struct Attend {
    const Span* spans;
    int count, shared;
    int head, group;  // KV head; query heads per KV head
    int heads;        // query heads in all
    const void* q;    // tokens x heads x head_dim
    float* out;
    size_t out_stride;
    uint8_t* layer;
    float scale, softcap;
    int window;  // 0 = all
    uint8_t* scratch;  // Kernels::scratch_bytes, aligned to 64
};

struct SampleParams {
    float temperature, top_p, min_p;
    int top_k;
    uint32_t seed_low, seed_high, child, position;
};

struct Kernels {
    const char* name;
    void (*product[kFormats])(const Product&);
    // out = x / sqrt(mean(x^2) + eps) * weight
    void (*norm)(const float* x, const float* weight, int n, float eps, float* out);
    // Row `row` of `acts` from x, in the wanted forms; a row with a number that is not finite becomes NaN.
    void (*convert)(const float* x, const Acts& acts, size_t row, int forms);
    void (*token_heads)(const TokenHeads&, const KvShape&);
    void (*attend)(const Attend&, const KvShape&);
    // Scales and soft-caps a row of logits in place, fills the padding; returns whether all are finite.
    bool (*finish_logits)(float* row, int vocab, float scale, float softcap);
    // The sampled token. `scratch`: 8 bytes per padded vocabulary entry.
    int (*sample)(const float* row, int vocab, const SampleParams&, void* scratch);
    // log of the sum of exp(row)
    double (*log_sum_exp)(const float* row, int vocab);
    // How many entries are greater than `value`.
    int (*count_greater)(const float* row, int vocab, float value);
    size_t scratch_bytes;  // of one attention task
};

// The table for `name` ("avx512bf16", "avx512", "avx2", "portable"; "" = the best); null when this machine or this
// build lacks it.
const Kernels* find_kernels(const char* name);

}  // namespace octavo
