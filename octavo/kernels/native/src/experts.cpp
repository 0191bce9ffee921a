// The mixture of experts: each token goes through a few of many gated MLPs.
#include <algorithm>
#include <cmath>

#include "engine.h"

namespace octavo {

// Reads acts_ (the normed rows), adds to x_. Like a dense MLP, but the rows are sorted by expert in between.
void Engine::experts(const Layer& l, int thread) {
    int n = active_, chosen = l.dims.chosen, slots = n * chosen;
    size_t hidden = hidden_stride_, mlp = static_cast<size_t>(l.experts_gate_up.width);
    auto mine = [&](int count, auto&& work) {
        for (int i = pool_.share(count, thread); i < pool_.share(count, thread + 1); i++) work(static_cast<size_t>(i));
    };
    multiply(l.router, hidden, n, scores_, static_cast<size_t>(l.router.width), Epilogue::Store, thread);
    mine(n, [&](size_t t) { choose_experts(l, t); });
    pool_.barrier();
    if (thread == 0) sort_choices(l);
    pool_.barrier();
    Acts from = acts(hidden), to = slot_acts_;
    to.stride = hidden;
    mine(slots, [&](size_t c) {
        size_t token = c / static_cast<size_t>(chosen), slot = static_cast<size_t>(slot_[c]);
        const Matrix& up = l.experts_gate_up.parts[static_cast<size_t>(choice_[c])];
        int form = form_of(up.format);
        if (up.order) return convert_ordered(from.f32 + token * hidden, up, to, slot, thread);
        if (form & kInt8) {
            std::copy_n(from.q + token * hidden, hidden, to.q + slot * hidden);
            std::copy_n(from.blocks + token * (hidden / kBlock), hidden / kBlock, to.blocks + slot * (hidden / kBlock));
        }
        if (form & kBf16) std::copy_n(from.bf16 + token * hidden, hidden, to.bf16 + slot * hidden);
        if (form & kFloat) std::copy_n(from.f32 + token * hidden, hidden, to.f32 + slot * hidden);
    });
    pool_.barrier();
    multiply(up_pieces_, to, mlp_, mlp, dims_.gelu ? Epilogue::GateGelu : Epilogue::GateSilu, thread);
    to.stride = mlp;
    mine(slots, [&](size_t c) {
        size_t slot = static_cast<size_t>(slot_[c]);
        const Matrix& down = l.experts_down.parts[static_cast<size_t>(choice_[c])];
        const float* x = mlp_ + slot * mlp;
        if (down.order) return convert_ordered(x, down, to, slot, thread);
        kernels_->convert(x, to, slot, form_of(down.format));
    });
    pool_.barrier();
    multiply(down_pieces_, to, slot_y_, hidden, Epilogue::Store, thread);
    mine(n, [&](size_t t) {
        float* out = x_ + t * hidden;
        for (size_t c = t * static_cast<size_t>(chosen); c < (t + 1) * static_cast<size_t>(chosen); c++) {
            const float* y = slot_y_ + static_cast<size_t>(slot_[c]) * hidden;
            float weight = weight_[c] * dims_.residual_scale;
            for (size_t i = 0; i < hidden; i++) out[i] += weight * y[i];
        }
    });
    pool_.barrier();
}

// Softmax over all experts, then the best ones; of equal scores the smaller number.
void Engine::choose_experts(const Layer& l, size_t token) {
    const float* score = scores_ + token * static_cast<size_t>(l.router.width);
    int experts = l.dims.experts, chosen = l.dims.chosen;
    int* choice = choice_.data() + token * static_cast<size_t>(chosen);
    float* weight = weight_.data() + token * static_cast<size_t>(chosen);
    float top = *std::max_element(score, score + experts), sum = 0, kept = 0;
    for (int e = 0; e < experts; e++) sum += std::exp(score[e] - top);
    for (int c = 0; c < chosen; c++) {
        int best = -1;
        for (int e = 0; e < experts; e++) {
            bool taken = std::find(choice, choice + c, e) != choice + c;
            if (!taken && (best < 0 || score[e] > score[best])) best = e;
        }
        choice[c] = best;
        weight[c] = std::exp(score[best] - top) / sum;
        kept += weight[c];
    }
    for (int c = 0; l.dims.normalise && c < chosen; c++) weight[c] /= kept;
}

// Gives every choice its slot, experts one after the other, and makes the products of the experts that were chosen.
void Engine::sort_choices(const Layer& l) {
    int slots = active_ * l.dims.chosen;
    std::vector<int> next(static_cast<size_t>(l.dims.experts) + 1);
    for (int c = 0; c < slots; c++) next[static_cast<size_t>(choice_[static_cast<size_t>(c)]) + 1]++;
    up_pieces_.clear();
    down_pieces_.clear();
    for (size_t e = 0; e + 1 < next.size(); e++) {
        int first = next[e], last = first + next[e + 1];
        if (last > first) {
            up_pieces_.push_back({&l.experts_gate_up.parts[e], first, last});
            down_pieces_.push_back({&l.experts_down.parts[e], first, last});
        }
        next[e + 1] = last;
    }
    for (int c = 0; c < slots; c++) slot_[static_cast<size_t>(c)] = next[static_cast<size_t>(choice_[static_cast<size_t>(c)])]++;
}

}  // namespace octavo
