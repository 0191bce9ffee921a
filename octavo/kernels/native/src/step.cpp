// One step through the model: the part of Engine that runs on all threads.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "engine.h"

namespace octavo {
namespace {

// Words of a parameter block; see octavo.scheduler.plan.
enum Param { kTopK = 3, kTemperature, kTopP, kMinP, kSeedLow, kSeedHigh, kChild };

float as_float(int32_t bits) {
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}

const int32_t* table(const Step& step, int row) {
    return step.tables + static_cast<size_t>(step.device_rows[row]) * static_cast<size_t>(step.table_columns);
}

// Thread `thread`'s share of 0 <= i < n, one range of neighbours.
template <class Work> void share(int n, int thread, int threads, Work&& work) {
    for (int i = n * thread / threads; i < n * (thread + 1) / threads; i++) work(static_cast<size_t>(i));
}

}  // namespace

SampleParams sample_params(const int32_t* p, int32_t position) {
    return {as_float(p[kTemperature]), as_float(p[kTopP]), as_float(p[kMinP]), p[kTopK],
            static_cast<uint32_t>(p[kSeedLow]), static_cast<uint32_t>(p[kSeedHigh]), static_cast<uint32_t>(p[kChild]),
            static_cast<uint32_t>(position)};
}

void Engine::forward(const Step& step) {
    calls_++;
    kept_.resize(static_cast<size_t>(step.samples) * hidden_stride_);
    shared_segments_ = 0;
    int highest = 0;
    for (int row = 0; row < step.rows; row++)
        highest = std::max(highest, table(step, row)[(step.start[row] + step.length[row] - 1) / dims_.block_size]);
    page_ahead_.used(static_cast<size_t>(highest + 1) * kv_shape_.stride);
    int chunks = (step.tokens + kChunk - 1) / kChunk;
    for (int c = 0; c < chunks; c++) {
        long first = static_cast<long>(step.tokens) * c / chunks, last = static_cast<long>(step.tokens) * (c + 1) / chunks;
        chunk(step, static_cast<int>(first), static_cast<int>(last - first));
    }
}

// Tokens first <= i < first + count of the step through all layers.
void Engine::chunk(const Step& step, int first, int count) {
    tokens_.clear();
    for (int row = 0, at = 0; row < step.rows && at < first + count; at += step.length[row++]) {
        int from = std::max(first - at, 0), to = std::min(first + count - at, static_cast<int>(step.length[row]));
        for (int i = from; i < to; i++) tokens_.push_back({row, step.start[row] + i, i + 1 == to});
    }
    active_ = count;
    int sample = find_wanted(step, first, count);
    ids_ = step.ids + first;
    plan_attention(step);
    pool_.run([&](int thread) {
        embed(thread);
        const float* post_norm = nullptr;  // of the layer before
        for (size_t i = 0; i < layers_.size(); i++) {
            add_and_norm(post_norm, layers_[i].attn_norm, &layers_[i].qkv, thread);
            layer(layers_[i], pools_[i], step, i + 1 == layers_.size(), thread);
            post_norm = layers_[i].post_mlp_norm;
        }
        if (post_norm) add_and_norm(post_norm, nullptr, nullptr, thread);
    });
    std::copy_n(x_, wanted_.size() * hidden_stride_, kept_.data() + static_cast<size_t>(sample) * hidden_stride_);
}

// Finds the tokens of the chunk whose hidden vectors are asked for: the last ones of rows that sample. Returns the
// number of the first of these samples; the others follow it.
int Engine::find_wanted(const Step& step, int first, int count) {
    wanted_.clear();
    int token = 0, row = 0, sample = 0;
    for (int i = 0; i < step.samples; i++) {
        for (; row <= step.sampled[i]; row++) token += step.length[row];
        int at = token - 1 - first;
        if (at < 0) sample = i + 1;
        if (at >= 0 && at < count) wanted_.push_back(at);
    }
    return sample;
}

// Goes on with the wanted tokens only, moved to the front: of the others, keys and values are all that is needed.
void Engine::drop_unwanted(int thread) {
    if (thread == 0) {
        for (size_t i = 0; i < wanted_.size(); i++) {
            size_t from = static_cast<size_t>(wanted_[i]);
            if (from == i) continue;
            std::copy_n(x_ + from * hidden_stride_, hidden_stride_, x_ + i * hidden_stride_);
            std::copy_n(attn_ + from * attn_stride_, attn_stride_, attn_ + i * attn_stride_);
        }
        active_ = static_cast<int>(wanted_.size());
    }
    pool_.barrier();
}

// Embeddings, and the rotations that all layers use.
void Engine::embed(int thread) {
    share(static_cast<int>(tokens_.size()), thread, threads(), [&](size_t t) {
        float* x = x_ + t * hidden_stride_;
        embedding(ids_[t], x);
        for (size_t i = 0; i < hidden_stride_; i++) x[i] *= dims_.embed_scale;
        float position = static_cast<float>(tokens_[t].position);
        for (int r = 0; r < 2; r++) {
            const Rotation& rotation = r ? dims_.window_rotation : dims_.rotation;
            size_t half = rotation.frequencies.size();
            for (size_t i = 0; i < half; i++) {
                double angle = static_cast<double>(position * rotation.frequencies[i]);
                cos_[r][t * half + i] = static_cast<float>(std::cos(angle)) * rotation.magnitude;
                sin_[r][t * half + i] = static_cast<float>(std::sin(angle)) * rotation.magnitude;
            }
        }
    });
    pool_.barrier();
}

void Engine::layer(const Layer& l, uint8_t* pool, const Step& step, bool last, int thread) {
    multiply(l.qkv, hidden_stride_, active_, qkv_, qkv_stride_, Epilogue::Store, thread);
    token_heads(l, pool, step, thread);
    attend(l, pool, thread);
    if (last) drop_unwanted(thread);
    int n = active_;
    if (!n) return;
    convert_rows(attn_, attn_stride_, n, l.o, thread);
    project(l.o, attn_stride_, thread);
    if (l.dims.experts) {
        add_and_norm(l.post_attn_norm, l.mlp_norm, &l.router, thread);
        experts(l, thread);
        return;
    }
    add_and_norm(l.post_attn_norm, l.mlp_norm, &l.gate_up, thread);
    size_t mlp = static_cast<size_t>(l.gate_up.width);
    multiply(l.gate_up, hidden_stride_, n, mlp_, mlp, dims_.gelu ? Epilogue::GateGelu : Epilogue::GateSilu, thread);
    convert_rows(mlp_, mlp, n, l.down, thread);
    project(l.down, mlp, thread);
}

// The product that ends a sub-layer: added to the residual stream, or left in y_ when a norm comes between.
void Engine::project(const Linear& linear, size_t in_stride, int thread) {
    bool later = dims_.post_norms;
    multiply(linear, in_stride, active_, later ? y_ : x_, hidden_stride_,
             later ? Epilogue::Store : Epilogue::Add, thread);
}

// Row `row` of what the next product reads, in its forms and orders.
void Engine::convert(const float* x, size_t stride, size_t row, const Linear& next, int thread) {
    if (next.forms) kernels_->convert(x, acts(stride), row, next.forms);
    int done = 0;
    for (const Matrix& m : next.parts)
        if (m.reads > done) convert_ordered(x, m, acts(stride, done = m.reads), row, thread);
}

// Row `row` of `to` from x in the order in which a matrix reads it.
void Engine::convert_ordered(const float* x, const Matrix& matrix, const Acts& to, size_t row, int thread) {
    float* ordered = ordered_[static_cast<size_t>(thread)];
    for (size_t i = 0; i < to.stride; i++) ordered[i] = x[matrix.order[i]];
    kernels_->convert(ordered, to, row, form_of(matrix.format));
}

// x += norm of y, when there is a `post_norm`; then the norm of x in the forms that the next product reads.
void Engine::add_and_norm(const float* post_norm, const float* norm, const Linear* next, int thread) {
    float* normed = normed_[static_cast<size_t>(thread)];
    share(active_, thread, threads(), [&](size_t t) {
        float* x = x_ + t * hidden_stride_;
        if (post_norm) {
            kernels_->norm(y_ + t * hidden_stride_, post_norm, dims_.hidden, dims_.eps, normed);
            for (size_t i = 0; i < hidden_stride_; i++) x[i] += dims_.residual_scale * normed[i];
        }
        if (!norm) return;
        kernels_->norm(x, norm, dims_.hidden, dims_.eps, normed);
        convert(normed, hidden_stride_, t, *next, thread);
    });
    pool_.barrier();
}

void Engine::convert_rows(const float* x, size_t stride, int rows, const Linear& next, int thread) {
    share(rows, thread, threads(), [&](size_t t) { convert(x + t * stride, stride, t, next, thread); });
    pool_.barrier();
}

void Engine::multiply(const Linear& linear, size_t in_stride, int n, float* out, size_t out_stride, Epilogue epilogue,
                      int thread) {
    std::vector<Piece>& pieces = pieces_[static_cast<size_t>(thread)];
    pieces.clear();
    for (const Matrix& m : linear.parts) pieces.push_back({&m, 0, n});
    multiply(pieces, acts(in_stride), out, out_stride, epilogue, thread);
}

void Engine::multiply(const std::vector<Piece>& pieces, const Acts& plain, float* out, size_t out_stride,
                      Epilogue epilogue, int thread) {
    int panels = 0;
    for (const Piece& piece : pieces) panels += piece.matrix->panels;
    // Few enough for long runs of memory, enough to even out threads that were held up.
    int grain = std::max(1, panels / (8 * threads()));
    for (Pool::Range range; pool_.take(panels, grain, thread, &range);) {
        int before = 0;
        for (const Piece& piece : pieces) {
            const Matrix& m = *piece.matrix;
            int first = std::max(range.first - before, 0), last = std::min(range.last - before, m.panels);
            int share_end = std::min(range.share_end - before, m.panels);
            before += m.panels;
            if (first >= last) continue;
            Product product = {m.data, m.panel_bytes, pad_to(m.columns, kBlock), m.group,
                               m.reads ? acts(plain.stride, m.reads) : plain, piece.m0, piece.m1, first, last, share_end,
                               m.bias, out, out_stride, m.column0, epilogue, dims_.residual_scale};
            kernels_->product[static_cast<int>(m.format)](product);
        }
    }
    pool_.barrier();
}

void Engine::token_heads(const Layer& l, uint8_t* pool, const Step& step, int thread) {
    int r = l.dims.window ? 1 : 0;
    size_t half = (r ? dims_.window_rotation : dims_.rotation).frequencies.size(), width = dims_.kv == KvKind::F32 ? 4 : 2;
    size_t q_bytes = static_cast<size_t>(dims_.heads * dims_.head_dim) * width;
    share(static_cast<int>(tokens_.size()), thread, threads(), [&](size_t t) {
        const Token& token = tokens_[t];
        const int32_t* blocks = table(step, token.row);
        const float* x = qkv_ + t * qkv_stride_;
        TokenHeads h = {x + l.qkv.parts[0].column0, x + l.qkv.parts[1].column0, x + l.qkv.parts[2].column0,
                        l.q_norm, l.k_norm, dims_.eps, dims_.heads, static_cast<int>(2 * half),
                        cos_[r] + t * half, sin_[r] + t * half, q_ + t * q_bytes, pool,
                        blocks[token.position / dims_.block_size], token.position % dims_.block_size, token.last};
        kernels_->token_heads(h, kv_shape_);
    });
    pool_.barrier();
}

void Engine::attend(const Layer& l, uint8_t* pool, int thread) {
    int units = static_cast<int>(tasks_.size()) * dims_.kv_heads;
    for (Pool::Range range; pool_.take(units, 1, thread, &range);) {
        int u = range.first;
        const Task& task = tasks_[static_cast<size_t>(u / dims_.kv_heads)];
        // Rows leave a window at different places, so they share nothing in it.
        int shared = l.dims.window ? 0 : task.shared;
        Attend a = {spans_.data() + task.first, task.count, shared, u % dims_.kv_heads, dims_.heads / dims_.kv_heads,
                    dims_.heads, q_, attn_, attn_stride_, pool, dims_.softmax_scale, dims_.attention_softcap,
                    l.dims.window, scratch_[static_cast<size_t>(thread)]};
        kernels_->attend(a, kv_shape_);
    }
    pool_.barrier();
}

void Engine::add_task(int first, int count, int shared) {
    long cost = 0;
    for (int i = first; i < first + count; i++) {
        const Span& s = spans_[static_cast<size_t>(i)];
        cost += static_cast<long>(s.tokens) * (s.position + s.tokens);
    }
    tasks_.push_back({first, count, shared, cost});
    shared_segments_ += shared * (count - 1);
}

// Cuts the chunk into tasks: rows with one token together with those that begin with the same blocks, longer rows in
// pieces of at most kMaxQueries queries. The largest tasks come first, so that threads end at about the same time.
void Engine::plan_attention(const Step& step) {
    spans_.clear();
    tasks_.clear();
    std::vector<Span> single;
    int most = kMaxQueries / (dims_.heads / dims_.kv_heads), n = static_cast<int>(tokens_.size());
    for (int t = 0, end; t < n; t = end) {
        const Token& token = tokens_[static_cast<size_t>(t)];
        for (end = t + 1; end < n && tokens_[static_cast<size_t>(end)].row == token.row;) end++;
        const int32_t* blocks = table(step, token.row);
        if (end == t + 1) {
            single.push_back({blocks, t, 1, token.position});
            continue;
        }
        for (int from = t; from < end; from += most) {
            spans_.push_back({blocks, from, std::min(most, end - from), token.position + from - t});
            add_task(static_cast<int>(spans_.size()) - 1, 1, 0);
        }
    }
    plan_decode(single, most);
    std::stable_sort(tasks_.begin(), tasks_.end(), [](const Task& a, const Task& b) { return a.cost > b.cost; });
}

// How many whole segments of keys two rows have in the same blocks, and both see.
int Engine::common_segments(const Span& a, const Span& b) const {
    int limit = (std::min(a.position, b.position) + 1) / kSegment, s = 0;
    for (; s < limit; s++) {
        int from = s * kSegment / dims_.block_size, to = (s * kSegment + kSegment - 1) / dims_.block_size;
        if (!std::equal(a.table + from, a.table + to + 1, b.table + from)) break;
    }
    return s;
}

void Engine::plan_decode(std::vector<Span>& rows, int most) {
    std::stable_sort(rows.begin(), rows.end(), [&](const Span& a, const Span& b) {
        int n = a.position / dims_.block_size + 1, m = b.position / dims_.block_size + 1;
        return std::lexicographical_compare(a.table, a.table + n, b.table, b.table + m);
    });
    // Rows that share nothing also go together, so that one's keys come from memory while another is worked on; but
    // there should be enough tasks for all threads.
    int units = static_cast<int>(rows.size()) * dims_.kv_heads, together = std::clamp(units / (8 * threads()), 1, most);
    for (size_t i = 0, end; i < rows.size(); i = end) {
        int shared = 0;
        for (end = i + 1; end < rows.size() && static_cast<int>(end - i) < most; end++) {
            int common = common_segments(rows[end - 1], rows[end]);
            if (end == i + 1) shared = common;
            // A row that shares much less than those before would cost them their sharing.
            if (shared ? 2 * common < shared : common > 0 || static_cast<int>(end - i) >= together) break;
            shared = std::min(shared, common);
        }
        int first = static_cast<int>(spans_.size());
        spans_.insert(spans_.end(), rows.begin() + static_cast<long>(i), rows.begin() + static_cast<long>(end));
        add_task(first, static_cast<int>(end - i), shared);
    }
}

void Engine::head(int first, int n, float* out, uint8_t* bad) {
    const float* x = kept_.data() + static_cast<size_t>(first) * hidden_stride_;
    size_t stride = static_cast<size_t>(padded_vocab());
    pool_.run([&](int thread) {
        float* normed = normed_[static_cast<size_t>(thread)];
        share(n, thread, threads(), [&](size_t i) {
            kernels_->norm(x + i * hidden_stride_, norm_, dims_.hidden, dims_.eps, normed);
            convert(normed, hidden_stride_, i, head_, thread);
        });
        pool_.barrier();
        multiply(head_, hidden_stride_, n, out, stride, Epilogue::Store, thread);
        share(n, thread, threads(), [&](size_t i) {
            bad[i] = !kernels_->finish_logits(out + i * stride, dims_.vocab, dims_.logit_scale, dims_.logit_softcap);
        });
    });
}

void Engine::sample(const float* logits, int n, const int32_t* params, const int32_t* positions, int32_t* tokens) {
    size_t stride = static_cast<size_t>(padded_vocab());
    pool_.run([&](int thread) {
        for (Pool::Range range; pool_.take(n, 1, thread, &range);) {
            int i = range.first;
            SampleParams p = sample_params(params + static_cast<long>(i) * kParamWords, positions[i]);
            void* scratch = scratch_[static_cast<size_t>(thread)];
            tokens[i] = kernels_->sample(logits + static_cast<size_t>(i) * stride, dims_.vocab, p, scratch);
        }
    });
}

void Engine::head_and_sample(const Step& step, const int32_t* params, int32_t* tokens, uint8_t* bad) {
    size_t stride = static_cast<size_t>(padded_vocab());
    // Logits of at most 16 MB at a time, but of enough rows to make the head's weights worth reading.
    int most = std::clamp(static_cast<int>((size_t{16} << 20) / (4 * stride)), 16, 64);
    logits_.resize(std::max(logits_.size(), static_cast<size_t>(std::min(most, step.samples)) * stride));
    std::vector<int32_t> blocks, positions;
    for (int i = 0; i < step.samples; i += most) {
        int n = std::min(most, step.samples - i);
        head(i, n, logits_.data(), bad + i);
        blocks.clear();
        positions.clear();
        for (int j = i; j < i + n; j++) {
            int row = step.sampled[j];
            const int32_t* block = params + static_cast<long>(step.device_rows[row]) * kParamWords;
            blocks.insert(blocks.end(), block, block + kParamWords);
            positions.push_back(step.start[row] + step.length[row]);
        }
        sample(logits_.data(), n, blocks.data(), positions.data(), tokens + i);
    }
}

}  // namespace octavo
