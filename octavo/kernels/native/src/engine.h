// A decoder-only transformer on the processor: packed weights, paged KV pool, one call a step.
//
// Owned by the Python runner, called by one thread at a time. Weights are given tensor by tensor, then `ready` checks
// that nothing is missing; from then on `forward`, `head` and `sample` may be called.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kernels.h"
#include "page_ahead.h"
#include "pool.h"
#include "weights.h"

namespace octavo {

constexpr int kChunk = 512;          // tokens that go through the layers together
constexpr int kParamWords = 16;      // of a row's parameter block; words as in octavo.scheduler.plan

// Zeroed memory in large pages where the system has them, handed out in order and freed as a whole.
class Arena {
  public:
    ~Arena();
    // Aligned to 64 bytes. Throws std::bad_alloc.
    void* take(size_t bytes);
    template <class T> T* take_array(size_t n) { return static_cast<T*>(take(n * sizeof(T))); }
    size_t bytes() const { return total_; }

  private:
    struct Piece {
        uint8_t* start;
        size_t size, used;
    };
    std::vector<Piece> pieces_;
    size_t total_ = 0;
};

struct LayerDims {
    int mlp, window, experts, chosen, normalise;  // window, experts: 0 = none; chosen: experts of a token
};

// Rotation of a head: radians per position of each pair, factor on cosines and sines.
struct Rotation {
    std::vector<float> frequencies;
    float magnitude;
};

struct Dims {
    int vocab, hidden, heads, kv_heads, head_dim;
    float eps, softmax_scale, embed_scale, residual_scale, logit_scale, attention_softcap, logit_softcap;
    bool gelu, post_norms;
    std::vector<LayerDims> layers;
    Rotation rotation, window_rotation;  // the second for layers with a window
    int block_size, blocks;
    KvKind kv;
};

// One packed matrix, or a part of the rows of a product. `order`: the input that each column belongs to, null when they
// lie in order; `reads`: the activations it is multiplied with, 0 as they come, n in order n - 1 of the Linear.
struct Matrix {
    Format format;
    uint8_t* data = nullptr;
    const float* bias = nullptr;
    const int32_t* order = nullptr;
    size_t panel_bytes = 0;
    int rows = 0, columns = 0, panels = 0, column0 = 0, group = 0, reads = 0;
};

// Matrices that read the same activations and write side by side, each from a multiple of 32 on. `forms`: those that
// are read as they come; `orders`: of columns, in which others read them in 8 bits.
struct Linear {
    std::vector<Matrix> parts;
    std::vector<const int32_t*> orders;
    int width = 0, forms = 0;
};

struct Layer {
    LayerDims dims;
    const float *attn_norm = nullptr, *mlp_norm = nullptr, *q_norm = nullptr, *k_norm = nullptr;
    const float *post_attn_norm = nullptr, *post_mlp_norm = nullptr;
    Linear qkv, o, gate_up, down;
    Linear router, experts_gate_up, experts_down;  // one part an expert
};

// A matrix and the rows of activations that it is multiplied with.
struct Piece {
    const Matrix* matrix;
    int m0, m1;
};

// The rows of one step. `tables` has `table_columns` words a device row.
struct Step {
    int rows, tokens;
    const int32_t *ids, *device_rows, *start, *length;
    const int32_t* tables;
    int table_columns;
    const int32_t* sampled;  // rows that sample, ascending
    int samples;
};

KvShape kv_shape(KvKind kind, int head_dim, int kv_heads, int block_size);
SampleParams sample_params(const int32_t* words, int32_t position);

class Engine {
  public:
    // Throws std::invalid_argument for an unknown instruction set.
    Engine(const Dims& dims, int threads, const std::string& isa);

    // Throw std::invalid_argument when the name or a size is wrong. `part` counts q, k, v.
    // `order`: see Matrix, of job.columns inputs; null when columns lie in order.
    void add_matrix(int layer, const std::string& name, int part, const PackJob& job, const int32_t* order = nullptr);
    void add_vector(int layer, const std::string& name, int part, const float* values, int n);
    void ready();

    void copy_blocks(const int32_t* pairs, int n);

    // All layers; keeps the hidden vectors of the sampling rows' last tokens.
    void forward(const Step& step);
    // Logits of sampling rows first <= i < first + n into out [n, padded vocabulary]; bad[i]: not finite.
    void head(int first, int n, float* out, uint8_t* bad);
    // One token for each row of logits; `params` has kParamWords words a row. Not for rows that are bad.
    void sample(const float* logits, int n, const int32_t* params, const int32_t* positions, int32_t* tokens);
    // head and sample for all sampling rows, some at a time.
    void head_and_sample(const Step& step, const int32_t* params, int32_t* tokens, uint8_t* bad);

    // Row `row` of the embedding as float32, unscaled; for tests.
    void embedding(int row, float* out) const;

    int vocab() const { return dims_.vocab; }
    int padded_vocab() const { return pad_to(dims_.vocab, kPanel); }
    int block_size() const { return dims_.block_size; }
    int blocks() const { return dims_.blocks; }
    int kept() const { return static_cast<int>(kept_.size() / std::max<size_t>(hidden_stride_, 1)); }
    long calls() const { return calls_; }
    const Kernels& kernels() const { return *kernels_; }
    int threads() const { return pool_.threads(); }
    size_t weight_bytes() const { return weights_.bytes(); }
    size_t kv_bytes() const { return kv_bytes_; }
    int shared_segments() const { return shared_segments_; }

  private:
    struct Token {
        int row;       // of the step
        int position;
        bool last;     // of its row in the chunk
    };
    // Spans first <= i < first + count, whose rows share the first `shared` segments; cost: queries x keys.
    struct Task {
        int first, count, shared;
        long cost;
    };

    Linear* linear(int layer, const std::string& name);
    const float** vector_slot(int layer, const std::string& name);
    void allocate_buffers();
    void allocate_pool();
    Acts take_acts(size_t rows, size_t stride);
    Acts acts(size_t stride, int reads = 0) const;
    void set_order(Linear& linear, Matrix& matrix, const int32_t* order, bool own);

    void chunk(const Step& step, int first, int count);
    void plan_attention(const Step& step);
    void plan_decode(std::vector<Span>& rows, int most);
    int common_segments(const Span& a, const Span& b) const;
    void add_task(int first, int count, int shared);

    // On all threads; each of these ends with a barrier.
    void embed(int thread);
    void layer(const Layer& layer, uint8_t* pool, const Step& step, bool last, int thread);
    void drop_unwanted(int thread);
    void add_and_norm(const float* post_norm, const float* norm, const Linear* next, int thread);
    void convert(const float* x, size_t stride, size_t row, const Linear& next, int thread);
    void convert_ordered(const float* x, const Matrix& matrix, const Acts& to, size_t row, int thread);
    void convert_rows(const float* x, size_t stride, int rows, const Linear& next, int thread);
    void multiply(const Linear& linear, size_t in_stride, int n, float* out, size_t out_stride, Epilogue epilogue,
                  int thread);
    // `plain`: the activations as they come, for matrices that read no others.
    void multiply(const std::vector<Piece>& pieces, const Acts& plain, float* out, size_t out_stride, Epilogue epilogue,
                  int thread);
    void project(const Linear& linear, size_t in_stride, int thread);
    void token_heads(const Layer& layer, uint8_t* pool, const Step& step, int thread);
    void attend(const Layer& layer, uint8_t* pool, int thread);
    void experts(const Layer& layer, int thread);
    void choose_experts(const Layer& layer, size_t token);
    void sort_choices(const Layer& layer);

    int find_wanted(const Step& step, int first, int count);

    Dims dims_;
    const Kernels* kernels_;
    Pool pool_;
    Arena weights_, kv_, buffers_;
    KvShape kv_shape_;
    size_t kv_bytes_ = 0;
    std::vector<Layer> layers_;
    std::vector<uint8_t*> pools_;  // where each layer's part of block 0 is
    PageAhead page_ahead_;         // after kv_: it ends first
    Matrix embed_;
    Linear head_;
    const float* norm_ = nullptr;

    // Buffers of one chunk. Strides are padded sizes.
    size_t hidden_stride_ = 0, qkv_stride_ = 0, attn_stride_ = 0;
    float *x_ = nullptr, *qkv_ = nullptr, *attn_ = nullptr, *mlp_ = nullptr;
    float *cos_[2] = {}, *sin_[2] = {};  // without and with a window
    uint8_t* q_ = nullptr;
    float* y_ = nullptr;  // what a norm is applied to before it is added to x
    std::vector<Acts> acts_;       // as they come, then in the orders of the next product
    std::vector<std::vector<Piece>> pieces_;  // per thread
    std::vector<float*> normed_, ordered_;   // per thread
    std::vector<uint8_t*> scratch_;  // per thread
    std::vector<float> kept_, logits_;
    std::vector<Token> tokens_;
    std::vector<int> wanted_;  // of the chunk's tokens, ascending
    int active_ = 0;           // tokens that the current layer works on
    const int32_t* ids_ = nullptr;
    std::vector<Span> spans_;
    std::vector<Task> tasks_;
    int shared_segments_ = 0;

    // Mixture of experts: choices of a token side by side; slots are choices sorted by expert.
    Acts slot_acts_{};
    float *scores_ = nullptr, *slot_y_ = nullptr;
    std::vector<int> choice_, slot_;
    std::vector<float> weight_;
    std::vector<Piece> up_pieces_, down_pieces_;
    long calls_ = 0;
};

}  // namespace octavo
