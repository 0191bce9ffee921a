#include "probes.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "engine.h"

namespace octavo {
namespace {

const Kernels& need(const std::string& isa) {
    const Kernels* k = find_kernels(isa.c_str());
    if (!k) throw std::invalid_argument("this machine or build has no kernels for " + isa);
    return *k;
}

// A packed matrix and its activations, owned together.
struct Bench {
    Arena arena;
    const Kernels& kernels;
    Matrix matrix;
    size_t panel;
    Acts acts{};

    Bench(const std::string& isa, const PackJob& job, int copies, int m) : kernels(need(isa)) {
        matrix.format = job.format;
        matrix.columns = job.columns;
        matrix.group = job.group;
        matrix.panels = panels_of(job);
        panel = panel_bytes(job.format, job.columns, job.group);
        size_t bytes = panel * static_cast<size_t>(matrix.panels);
        matrix.data = arena.take_array<uint8_t>(bytes * static_cast<size_t>(copies));
        for (int p = 0; p < matrix.panels; p++) pack_panel(job, p, matrix.data + panel * static_cast<size_t>(p));
        for (int c = 1; c < copies; c++) std::memcpy(matrix.data + bytes * static_cast<size_t>(c), matrix.data, bytes);
        acts.stride = static_cast<size_t>(pad_to(job.columns, kBlock));
        size_t n = acts.stride * static_cast<size_t>(m);
        acts.q = arena.take_array<int8_t>(n);
        acts.blocks = arena.take_array<ActBlock>(n / kBlock);
        acts.bf16 = arena.take_array<uint16_t>(n);
        acts.f32 = arena.take_array<float>(n);
    }

    void convert(const float* x, int m) {
        float* row = arena.take_array<float>(acts.stride);
        for (int i = 0; i < m; i++) {
            std::copy_n(x + static_cast<long>(i) * matrix.columns, matrix.columns, row);
            kernels.convert(row, acts, static_cast<size_t>(i), form_of(matrix.format));
        }
    }

    void multiply(int copy, int m, const Pool::Range& p, float* out) {
        const uint8_t* data = matrix.data + panel * static_cast<size_t>(matrix.panels) * static_cast<size_t>(copy);
        size_t width = static_cast<size_t>(matrix.panels) * kPanel;
        kernels.product[static_cast<int>(matrix.format)](
            {data, panel, static_cast<int>(acts.stride), matrix.group, acts, 0, m, p.first, p.last, p.share_end, nullptr, out, width, 0, Epilogue::Store, 1});
    }
};

}  // namespace

void probe_product(const std::string& isa, const PackJob& job, const float* x, int m, float* out) {
    Bench bench(isa, job, 1, m);
    bench.convert(x, m);
    size_t width = static_cast<size_t>(bench.matrix.panels) * kPanel;
    float* wide = bench.arena.take_array<float>(width * static_cast<size_t>(m));
    bench.multiply(0, m, {0, bench.matrix.panels, bench.matrix.panels}, wide);
    for (int i = 0; i < m; i++) std::copy_n(wide + static_cast<size_t>(i) * width, job.rows, out + static_cast<long>(i) * job.rows);
}

void probe_unpack(const PackJob& job, float* out) {
    Bench bench("", job, 1, 1);
    std::vector<float> row(bench.acts.stride);
    for (int i = 0; i < job.rows; i++) {
        unpack_row(job.format, job.group, bench.matrix.data, i, job.columns, row.data());
        std::copy_n(row.data(), job.columns, out + static_cast<long>(i) * job.columns);
    }
}

void probe_attention(const std::string& isa, const Probe& p, const int32_t* start, const int32_t* length, int rows,
                     const int32_t* tables, int table_columns, const float* q, const float* k, const float* v, float* out) {
    const Kernels& kernels = need(isa);
    KvShape shape = kv_shape(p.kv, p.head_dim, p.kv_heads, p.block_size);
    Arena arena;
    uint8_t* layer = arena.take_array<uint8_t>(shape.block_bytes * static_cast<size_t>(p.blocks));
    uint8_t* scratch = arena.take_array<uint8_t>(kernels.scratch_bytes);
    size_t q_row = static_cast<size_t>(p.heads * p.head_dim), kv_row = static_cast<size_t>(p.kv_heads * p.head_dim);
    float* q_out = arena.take_array<float>(q_row * (kMaxQueries + 1));
    int group = p.heads / p.kv_heads;
    for (int r = 0; r < rows; r++) {
        const int32_t* table = tables + static_cast<long>(r) * table_columns;
        int total = start[r] + length[r], most = kMaxQueries / group;
        for (int i = 0; i < total; i++, k += kv_row, v += kv_row) {
            TokenHeads h = {q, k, v, nullptr, nullptr, 0, 0, 0, nullptr, nullptr, q_out, layer, table[i / p.block_size],
                            i % p.block_size, i + 1 == total};
            kernels.token_heads(h, shape);
        }
        size_t width = p.kv == KvKind::F32 ? 4 : 2;
        for (int from = 0; from < length[r]; from += most) {
            int n = std::min(most, length[r] - from);
            for (int i = 0; i < n; i++, q += q_row) {
                KvShape none = shape;
                none.kv_heads = 0;
                TokenHeads h = {q, k, v, nullptr, nullptr, 0, p.heads, 0, nullptr, nullptr,
                                reinterpret_cast<uint8_t*>(q_out) + static_cast<size_t>(i) * q_row * width, layer, 0, 0, false};
                kernels.token_heads(h, none);
            }
            Span span = {table, 0, n, start[r] + from};
            for (int head = 0; head < p.kv_heads; head++)
                kernels.attend({&span, 1, 0, head, group, p.heads, q_out, out, q_row, layer, p.scale, p.softcap, p.window, scratch},
                               shape);
            out += q_row * static_cast<size_t>(n);
        }
    }
}

int probe_sample(const std::string& isa, const float* logits, int vocab, const int32_t* params, int position) {
    const Kernels& kernels = need(isa);
    size_t padded = static_cast<size_t>(pad_to(vocab, kPanel));
    std::vector<float> row(padded);
    std::vector<uint8_t> scratch(8 * padded);
    std::copy_n(logits, vocab, row.data());
    kernels.finish_logits(row.data(), vocab, 1, 0);
    return kernels.sample(row.data(), vocab, sample_params(params, position), scratch.data());
}

double time_product(const std::string& isa, const PackJob& job, int m, int copies, int threads, int repeats) {
    Bench bench(isa, job, copies, m);
    std::vector<float> x(static_cast<size_t>(m) * static_cast<size_t>(job.columns));
    for (size_t i = 0; i < x.size(); i++) x[i] = static_cast<float>(i * 2654435761u % 2001) / 1000 - 1;
    bench.convert(x.data(), m);
    float* out = bench.arena.take_array<float>(static_cast<size_t>(m) * static_cast<size_t>(bench.matrix.panels) * kPanel);
    Pool pool(threads);
    double best = 1e30;
    int grain = std::max(1, bench.matrix.panels / (8 * threads));
    for (int r = 0; r < repeats; r++) {
        auto begin = std::chrono::steady_clock::now();
        pool.run([&](int thread) {
            for (int copy = 0; copy < copies; copy++) {
                for (Pool::Range p; pool.take(bench.matrix.panels, grain, thread, &p);)
                    bench.multiply(copy, m, p, out);
                pool.barrier();
            }
        });
        std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
        best = std::min(best, seconds.count() / copies);
    }
    return best;
}

}  // namespace octavo
