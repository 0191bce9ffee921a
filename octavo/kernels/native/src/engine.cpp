#include "engine.h"

#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <new>
#include <stdexcept>

namespace octavo {

Arena::~Arena() {
    for (Piece& piece : pieces_) munmap(piece.start, piece.size);
}

void* Arena::take(size_t bytes) {
    constexpr size_t kPiece = size_t{32} << 20, kLargePage = size_t{2} << 20;
    bytes = (bytes + 63) / 64 * 64;
    if (pieces_.empty() || pieces_.back().size - pieces_.back().used < bytes) {
        size_t size = (std::max(bytes, kPiece) + kLargePage - 1) / kLargePage * kLargePage;
        void* p = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (p == MAP_FAILED) throw std::bad_alloc();
        madvise(p, size, MADV_HUGEPAGE);
        pieces_.push_back({static_cast<uint8_t*>(p), size, 0});
    }
    Piece& piece = pieces_.back();
    void* p = piece.start + piece.used;
    piece.used += bytes;
    total_ += bytes;
    return p;
}

namespace {

const Kernels* need_kernels(const std::string& isa) {
    const Kernels* k = find_kernels(isa.c_str());
    if (!k) throw std::invalid_argument("this machine or build has no kernels for " + isa);
    return k;
}

// Takes whole pages of a mapped file that hold the rows of some panels out of this process's memory.
void give_back(const PackJob& job, int first_panel, int last_panel) {
    size_t row = stored_row_bytes(job.stored, job.columns), page = 4096;
    int rows = job.second ? kPanel / 2 : kPanel;
    for (const uint8_t* matrix : {job.first, job.second}) {
        if (!matrix) continue;
        uintptr_t base = reinterpret_cast<uintptr_t>(matrix);
        uintptr_t first = base + static_cast<size_t>(first_panel * rows) * row;
        uintptr_t last = base + static_cast<size_t>(std::min(last_panel * rows, job.rows)) * row;
        first = (first + page - 1) / page * page;
        last = last / page * page;
        if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED);
    }
}

}  // namespace

KvShape kv_shape(KvKind kind, int head_dim, int kv_heads, int block_size) {
    KvShape s{};
    s.kind = kind;
    s.head_dim = head_dim;
    s.kv_heads = kv_heads;
    s.block_size = block_size;
    s.tiles_per_block = pad_to(block_size, kTile) / kTile;
    size_t width = kind == KvKind::F32 ? 4 : kind == KvKind::BF16 ? 2 : 1;
    s.part_bytes = width * static_cast<size_t>(kTile * head_dim);
    s.tile_bytes = 2 * s.part_bytes + (kind == KvKind::I8 ? 2 * kTile * sizeof(float) : 0);
    s.head_bytes = s.tile_bytes * static_cast<size_t>(s.tiles_per_block);
    s.block_bytes = s.stride = s.head_bytes * static_cast<size_t>(kv_heads);
    return s;
}

Engine::Engine(const Dims& dims, int threads, const std::string& isa)
    : dims_(dims), kernels_(need_kernels(isa)), pool_(threads),
      kv_shape_(kv_shape(dims.kv, dims.head_dim, dims.kv_heads, dims.block_size)), layers_(dims.layers.size()) {
    for (size_t i = 0; i < layers_.size(); i++) layers_[i].dims = dims.layers[i];
    if (dims.head_dim % 16 || dims.head_dim > 256 || dims.heads % dims.kv_heads || dims.heads / dims.kv_heads > kMaxQueries)
        throw std::invalid_argument("heads of this size are not supported");
    if (dims.block_size != 8 && dims.block_size % kTile)
        throw std::invalid_argument("the block size must be 8 or a multiple of 16");
}

Linear* Engine::linear(int layer, const std::string& name) {
    if (layer < 0) return name == "head" ? &head_ : nullptr;
    if (layer >= static_cast<int>(layers_.size())) return nullptr;
    Layer& l = layers_[static_cast<size_t>(layer)];
    const std::pair<const char*, Linear*> all[] = {{"qkv", &l.qkv}, {"o", &l.o}, {"gate_up", &l.gate_up},
                                                   {"down", &l.down}, {"router", &l.router},
                                                   {"experts_gate_up", &l.experts_gate_up},
                                                   {"experts_down", &l.experts_down}};
    for (const auto& [key, linear] : all)
        if (name == key) return linear;
    return nullptr;
}

// Keeps the order in which a matrix reads its inputs; all matrices of a product share what is the same. `own`: each has
// activations of its own anyway.
void Engine::set_order(Linear& linear, Matrix& matrix, const int32_t* order, bool own) {
    int n = matrix.columns, padded = pad_to(n, kBlock);
    std::vector<const int32_t*>& known = linear.orders;
    auto same = [&](const int32_t* other) { return std::equal(order, order + n, other); };
    auto found = own ? known.end() : std::find_if(known.begin(), known.end(), same);
    if (found == known.end()) {
        int32_t* copy = weights_.take_array<int32_t>(static_cast<size_t>(padded));
        std::copy_n(order, n, copy);
        for (int i = n; i < padded; i++) copy[i] = i;  // the padding of activations stays where it is
        matrix.order = copy;
        if (own) return;
        found = known.insert(known.end(), copy);
    }
    matrix.order = *found;
    matrix.reads = static_cast<int>(found - known.begin()) + 1;
}

void Engine::add_matrix(int layer, const std::string& name, int part, const PackJob& job, const int32_t* order) {
    Matrix m;
    m.format = job.format;
    m.group = job.group;
    m.rows = job.rows;
    m.columns = job.columns;
    m.panels = panels_of(job);
    size_t bytes = m.panel_bytes = panel_bytes(job.format, job.columns, job.group);
    m.data = weights_.take_array<uint8_t>(bytes * static_cast<size_t>(m.panels));
    // Some megabytes at a time, so that little of a mapped file is in memory beside what was made of it.
    int step = std::max(8 * threads(), static_cast<int>((size_t{8} << 20) / bytes));
    for (int from = 0; from < m.panels; from += step) {
        int n = std::min(step, m.panels - from);
        pool_.run([&](int thread) {
            for (Pool::Range r; pool_.take(n, 4, thread, &r);)
                for (int i = from + r.first; i < from + r.last; i++)
                    pack_panel(job, i, m.data + bytes * static_cast<size_t>(i));
        });
        if (job.mapped) give_back(job, from, from + n);
    }
    if (layer < 0 && name == "embed") {
        if (order) throw std::invalid_argument("an embedding whose columns are out of order");
        embed_ = m;
        return;
    }
    Linear* l = linear(layer, name);
    if (!l || part != static_cast<int>(l->parts.size())) throw std::invalid_argument("no place for a matrix " + name);
    int width = job.second ? pad_to(job.rows, kPanel) : m.panels * kPanel;
    bool experts = name == "experts_gate_up" || name == "experts_down";  // each has rows of its own
    m.column0 = experts ? 0 : l->width;
    l->width = experts ? width : l->width + width;
    if (order) set_order(*l, m, order, experts);
    if (!m.reads) l->forms |= m.order ? kFloat : form_of(m.format);
    l->parts.push_back(m);
}

const float** Engine::vector_slot(int layer, const std::string& name) {
    if (layer < 0) return name == "norm" ? &norm_ : nullptr;
    Layer& l = layers_.at(static_cast<size_t>(layer));
    const std::pair<const char*, const float**> all[] = {{"attn_norm", &l.attn_norm}, {"mlp_norm", &l.mlp_norm},
                                                         {"q_norm", &l.q_norm}, {"k_norm", &l.k_norm},
                                                         {"post_attn_norm", &l.post_attn_norm},
                                                         {"post_mlp_norm", &l.post_mlp_norm}};
    for (const auto& [key, slot] : all)
        if (name == key) return slot;
    return nullptr;
}

void Engine::add_vector(int layer, const std::string& name, int part, const float* values, int n) {
    if (const float** slot = vector_slot(layer, name)) {
        float* copy = weights_.take_array<float>(static_cast<size_t>(pad_to(n, kPanel)));
        std::copy(values, values + n, copy);
        *slot = copy;
        return;
    }
    Linear* l = linear(layer, name);
    if (!l || part >= static_cast<int>(l->parts.size())) throw std::invalid_argument("no place for a vector " + name);
    Matrix& m = l->parts[static_cast<size_t>(part)];
    bool paired = name == "gate_up";  // the bias of the gates, then that of the values; placed like the rows
    if (n != (paired ? 2 : 1) * m.rows) throw std::invalid_argument("the bias " + name + " has a wrong size");
    float* copy = weights_.take_array<float>(static_cast<size_t>(m.panels) * kPanel);
    for (int i = 0; i < n; i++) {
        int row = i % m.rows, place = paired ? row / 16 * kPanel + row % 16 + (i >= m.rows ? 16 : 0) : i;
        copy[place] = values[i];
    }
    m.bias = copy;
}

namespace {

// Whether a linear has a part of `columns` columns for each number of rows.
bool fits(const Linear& l, const std::vector<int>& rows, int columns) {
    bool good = l.parts.size() == rows.size();
    for (size_t i = 0; good && i < rows.size(); i++) good = l.parts[i].rows == rows[i] && l.parts[i].columns == columns;
    return good;
}

bool complete(const Layer& l, const Dims& d) {
    int q = d.heads * d.head_dim, kv = d.kv_heads * d.head_dim, mlp = l.dims.mlp;
    size_t experts = static_cast<size_t>(l.dims.experts);
    bool good = l.attn_norm && l.mlp_norm && fits(l.qkv, {q, kv, kv}, d.hidden) && fits(l.o, {d.hidden}, q) &&
                (!d.post_norms || (l.post_attn_norm && l.post_mlp_norm));
    if (!experts) return good && fits(l.gate_up, {mlp}, d.hidden) && fits(l.down, {d.hidden}, mlp);
    return good && !d.post_norms && l.dims.chosen > 0 && l.dims.chosen <= l.dims.experts && fits(l.router, {l.dims.experts}, d.hidden) &&
           fits(l.experts_gate_up, std::vector<int>(experts, mlp), d.hidden) &&
           fits(l.experts_down, std::vector<int>(experts, d.hidden), mlp);
}

}  // namespace

void Engine::ready() {
    if (!embed_.data || embed_.rows != dims_.vocab || embed_.columns != dims_.hidden || !norm_)
        throw std::invalid_argument("the embedding or the last norm is missing or has a wrong size");
    if (head_.parts.empty()) {
        head_.parts = {embed_};
        head_.width = embed_.panels * kPanel;
        head_.forms = form_of(embed_.format);
    }
    bool good = fits(head_, {dims_.vocab}, dims_.hidden);
    for (Layer& l : layers_) {
        good = good && complete(l, dims_);
        l.router.forms |= l.experts_gate_up.forms;  // both read the same rows
    }
    if (!good) throw std::invalid_argument("a weight is missing or has a wrong size");
    allocate_buffers();
    allocate_pool();
}

// All layers of a block lie together: memory is touched as blocks come into use, and a block is copied in one piece.
void Engine::allocate_pool() {
    size_t layer = kv_shape_.block_bytes, block = layer * layers_.size();
    // Blocks at the same place of every cache would drive each other out.
    if (block % (size_t{256} << 10) == 0) block += 4096;
    kv_shape_.stride = block;
    kv_bytes_ = block * static_cast<size_t>(dims_.blocks);
    uint8_t* pool = kv_.take_array<uint8_t>(kv_bytes_);
    for (size_t i = 0; i < layers_.size(); i++) pools_.push_back(pool + layer * i);
    page_ahead_.start(pool, kv_bytes_);
}

Acts Engine::take_acts(size_t rows, size_t stride) {
    size_t n = rows * stride;
    return {buffers_.take_array<int8_t>(n), buffers_.take_array<ActBlock>(n / kBlock), buffers_.take_array<uint16_t>(n),
            buffers_.take_array<float>(n), stride};
}

void Engine::allocate_buffers() {
    auto wide = [](int n) { return static_cast<size_t>(pad_to(n, kPanel)); };
    int widest_mlp = 1, experts = 0, chosen = 0;
    for (const LayerDims& l : dims_.layers) {
        widest_mlp = std::max(widest_mlp, l.mlp);
        experts = std::max(experts, l.experts);
        chosen = std::max(chosen, l.chosen);
    }
    hidden_stride_ = wide(dims_.hidden);
    attn_stride_ = wide(dims_.heads * dims_.head_dim);
    size_t mlp_stride = wide(widest_mlp), slots = kChunk * static_cast<size_t>(std::max(chosen, 1));
    qkv_stride_ = attn_stride_ + 2 * wide(dims_.kv_heads * dims_.head_dim);
    x_ = buffers_.take_array<float>(kChunk * hidden_stride_);
    y_ = buffers_.take_array<float>(kChunk * hidden_stride_);
    qkv_ = buffers_.take_array<float>(kChunk * qkv_stride_);
    attn_ = buffers_.take_array<float>(kChunk * attn_stride_);
    mlp_ = buffers_.take_array<float>(slots * mlp_stride);
    q_ = buffers_.take_array<uint8_t>(kChunk * attn_stride_ * 4);
    for (int i = 0; i < 2; i++) {
        size_t half = (i ? dims_.window_rotation : dims_.rotation).frequencies.size();
        cos_[i] = buffers_.take_array<float>(kChunk * half);
        sin_[i] = buffers_.take_array<float>(kChunk * half);
    }
    size_t widest = std::max({hidden_stride_, attn_stride_, mlp_stride}), orders = head_.orders.size();
    for (const Layer& l : layers_)
        for (const Linear* linear : {&l.qkv, &l.o, &l.gate_up, &l.down, &l.router}) orders = std::max(orders, linear->orders.size());
    for (size_t i = 0; i <= orders; i++) acts_.push_back(take_acts(kChunk, widest));
    if (experts) {
        slot_acts_ = take_acts(slots, std::max(hidden_stride_, mlp_stride));
        slot_y_ = buffers_.take_array<float>(slots * hidden_stride_);
        scores_ = buffers_.take_array<float>(kChunk * wide(experts));
        choice_.resize(slots);
        slot_.resize(slots);
        weight_.resize(slots);
    }
    pieces_.resize(static_cast<size_t>(pool_.threads()));
    for (int t = 0; t < pool_.threads(); t++) {
        normed_.push_back(buffers_.take_array<float>(hidden_stride_));
        ordered_.push_back(buffers_.take_array<float>(widest));
        size_t sampling = static_cast<size_t>(padded_vocab()) * 8;
        scratch_.push_back(buffers_.take_array<uint8_t>(std::max(kernels_->scratch_bytes, sampling)));
    }
}

Acts Engine::acts(size_t stride, int reads) const {
    Acts a = acts_[static_cast<size_t>(reads)];
    a.stride = stride;
    return a;
}

void Engine::copy_blocks(const int32_t* pairs, int n) {
    size_t stride = kv_shape_.stride;
    for (int i = 0; i < n; i++)
        std::memcpy(pools_[0] + static_cast<size_t>(pairs[2 * i + 1]) * stride,
                    pools_[0] + static_cast<size_t>(pairs[2 * i]) * stride, stride);
}

void Engine::embedding(int row, float* out) const { unpack_row(embed_.format, embed_.group, embed_.data, row, embed_.columns, out); }

}  // namespace octavo
