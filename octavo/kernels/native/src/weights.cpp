#include "weights.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace octavo {
namespace {

constexpr int kHalfRows = 16;

// 32 columns of one row, decoded: weight = scale[group] * (code - zero of the format) + minimum.
struct RowBlock {
    uint8_t code[kBlock];
    uint16_t scale[2];
    uint16_t minimum;
};

uint16_t half_at(const uint8_t* p) {
    uint16_t h;
    std::memcpy(&h, p, 2);
    return h;
}

void nibbles(const uint8_t* p, uint8_t* code) {
    for (int i = 0; i < 16; i++) {
        code[i] = p[i] & 15;
        code[i + 16] = p[i] >> 4;
    }
}

void fifth_bits(const uint8_t* p, uint8_t* code) {
    uint32_t bits;
    std::memcpy(&bits, p, 4);
    for (int i = 0; i < 32; i++) code[i] = static_cast<uint8_t>(code[i] | (bits >> i & 1) << 4);
}

// 6-bit scale and minimum number j of the 12 bytes that Q4_K and Q5_K blocks share.
void scale_of_k(const uint8_t* s, int j, int* scale, int* minimum) {
    if (j < 4) {
        *scale = s[j] & 63;
        *minimum = s[j + 4] & 63;
    } else {
        *scale = (s[j + 4] & 15) | (s[j - 4] >> 6) << 4;
        *minimum = s[j + 4] >> 4 | (s[j] >> 6) << 4;
    }
}

void decode_k(const uint8_t* super, int j, const uint8_t* low, const uint8_t* high, RowBlock* out) {
    int scale, minimum;
    scale_of_k(super + 4, j, &scale, &minimum);
    out->scale[0] = float_to_half(half_to_float(half_at(super)) * static_cast<float>(scale));
    out->minimum = float_to_half(-half_to_float(half_at(super + 2)) * static_cast<float>(minimum));
    for (int i = 0; i < 32; i++) {
        int code = low[32 * (j / 2) + i] >> (j % 2 * 4) & 15;
        if (high) code |= (high[i] >> j & 1) << 4;
        out->code[i] = static_cast<uint8_t>(code);
    }
}

void decode_q6_k(const uint8_t* super, int j, RowBlock* out) {
    const uint8_t *low = super + j / 4 * 64 + j % 2 * 32, *high = super + 128 + j / 4 * 32;
    const int8_t* scales = reinterpret_cast<const int8_t*>(super + 192) + j / 4 * 8 + j % 4 * 2;
    float d = half_to_float(half_at(super + 208));
    for (int g = 0; g < 2; g++) out->scale[g] = float_to_half(d * static_cast<float>(scales[g]));
    int shift = j % 4 / 2 * 4;
    for (int i = 0; i < 32; i++)
        out->code[i] = static_cast<uint8_t>((low[i] >> shift & 15) | (high[i] >> (j % 4 * 2) & 3) << 4);
}

// Columns 32 j .. 32 j + 31 of a stored row.
void decode_block(Stored stored, const uint8_t* row, int j, RowBlock* out) {
    const uint8_t* super;
    switch (stored) {
        case Stored::Q4_0:
            row += j * 18;
            out->scale[0] = half_at(row);
            nibbles(row + 2, out->code);
            break;
        case Stored::Q4_1:
            row += j * 20;
            out->scale[0] = half_at(row);
            out->minimum = half_at(row + 2);
            nibbles(row + 4, out->code);
            break;
        case Stored::Q5_0:
            row += j * 22;
            out->scale[0] = half_at(row);
            nibbles(row + 6, out->code);
            fifth_bits(row + 2, out->code);
            break;
        case Stored::Q5_1:
            row += j * 24;
            out->scale[0] = half_at(row);
            out->minimum = half_at(row + 2);
            nibbles(row + 8, out->code);
            fifth_bits(row + 4, out->code);
            break;
        case Stored::Q8_0:
            row += j * 34;
            out->scale[0] = half_at(row);
            for (int i = 0; i < 32; i++) out->code[i] = row[2 + i] ^ 0x80;
            break;
        case Stored::Q4_K:
            super = row + j / 8 * 144;
            decode_k(super, j % 8, super + 16, nullptr, out);
            break;
        case Stored::Q5_K:
            super = row + j / 8 * 176;
            decode_k(super, j % 8, super + 48, super + 16, out);
            break;
        case Stored::Q6_K: decode_q6_k(row + j / 8 * 210, j % 8, out); break;
        default: break;
    }
}

// Quantises 32 numbers to 4 bits between their extremes.
void quantize(const float* x, RowBlock* out) {
    float low = *std::min_element(x, x + kBlock), high = *std::max_element(x, x + kBlock);
    out->scale[0] = float_to_half((high - low) / 15);
    out->minimum = float_to_half(low);
    float scale = half_to_float(out->scale[0]), base = half_to_float(out->minimum);
    for (int i = 0; i < kBlock; i++) {
        float code = scale > 0 ? std::nearbyint((x[i] - base) / scale) : 0.0f;
        out->code[i] = static_cast<uint8_t>(std::clamp(code, 0.0f, 15.0f));
    }
}

// The scale, as half precision, with which n numbers become 8 bits around zero.
uint16_t scale_of(const float* x, int n) {
    float largest = 0;
    for (int i = 0; i < n; i++) largest = std::max(largest, std::fabs(x[i]));
    return float_to_half(largest / 127);
}

uint8_t code_of(float x, float scale) {
    float code = scale > 0 ? std::nearbyint(x / scale) : 0.0f;
    return static_cast<uint8_t>(std::clamp(code, -127.0f, 127.0f) + 128);
}

bool grouped(Format f) { return f >= Format::G4; }
bool has_zeros(Format f) { return f == Format::G4Z || f == Format::G8Z; }
int bits_of(Format f) {
    if (f == Format::Q8 || f == Format::G8 || f == Format::G8Z) return 8;
    return f == Format::Q6 ? 6 : f == Format::Q5 || f == Format::Q5M ? 5 : 4;
}
bool has_minimum(Format f) { return f == Format::Q4M || f == Format::Q5M; }
int code_bytes(Format f) { return bits_of(f) * kPanel * kBlock / 8; }
int plane_bytes(Format f) { return bits_of(f) == 8 ? 0 : code_bytes(f) - 4 * kPanel * kBlock / 8; }
int groups_of(Format f) { return f == Format::Q6 ? 2 : 1; }

// Adds the codes of row `i` of a panel to a block that was zeroed before.
void encode_codes(const RowBlock& row, int i, Format format, uint8_t* block) {
    int bits = bits_of(format), lane = i % kHalfRows;
    uint8_t *plane = block + i / kHalfRows * 64, *half = plane + plane_bytes(format);
    for (int s = 0; s < 8; s++)
        for (int c = 0; c < 4; c++) {
            int code = row.code[4 * s + c], byte = 4 * lane + c;
            if (bits == 8) {
                half[128 * s + byte] = static_cast<uint8_t>(code);
                continue;
            }
            half[128 * (s / 2) + byte] |= static_cast<uint8_t>((code & 15) << (s % 2 * 4));
            if (bits == 5) plane[byte] |= static_cast<uint8_t>((code >> 4) << s);
            if (bits == 6) plane[128 * (s / 4) + byte] |= static_cast<uint8_t>((code >> 4) << (s % 4 * 2));
        }
}

void encode(const RowBlock& row, int i, Format format, uint8_t* block) {
    encode_codes(row, i, format, block);
    uint8_t* facts = block + code_bytes(format);
    for (int g = 0; g < groups_of(format); g++) std::memcpy(facts + 64 * g + 2 * i, &row.scale[g], 2);
    if (has_minimum(format)) std::memcpy(facts + 64 * groups_of(format) + 2 * i, &row.minimum, 2);
}

void pack_floats(const float* x, int columns, int i, uint8_t* out) {
    for (int k = 0; k < columns; k++) std::memcpy(out + (static_cast<size_t>(k) * kPanel + i) * 4, x + k, 4);
}

uint16_t round_to_bf16(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if (x != x) return 0x7fc0;
    return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

void pack_bf16(const uint8_t* row, Stored stored, int columns, int i, uint8_t* out) {
    for (int k = 0; k < columns; k++) {
        uint16_t x = half_at(row + 2 * k);
        if (stored == Stored::F32) {
            float wide;
            std::memcpy(&wide, row + 4 * k, 4);
            x = round_to_bf16(wide);
        }
        std::memcpy(out + (static_cast<size_t>(k / 2) * kPanel + i) * 4 + k % 2 * 2, &x, 2);
    }
}

void pack_row(const PackJob& job, const uint8_t* row, int i, uint8_t* out) {
    if (job.format == Format::F32) return pack_floats(reinterpret_cast<const float*>(row), job.columns, i, out);
    if (job.format == Format::BF16) return pack_bf16(row, job.stored, job.columns, i, out);
    size_t step = block_bytes(job.format);
    for (int j = 0; j * kBlock < job.columns; j++) {
        RowBlock block{};
        if (job.stored == Stored::F32) {
            float x[kBlock] = {};
            std::memcpy(x, row + j * kBlock * 4, 4 * static_cast<size_t>(std::min(kBlock, job.columns - j * kBlock)));
            quantize(x, &block);
        } else {
            decode_block(job.stored, row, j, &block);
        }
        encode(block, i, job.format, out + static_cast<size_t>(j) * step);
    }
}

// Where group `g` of a grouped panel lies.
struct Place {
    size_t codes, scales, zeros, end;
};
Place place_of(Format f, int group, int g) {
    size_t n = static_cast<size_t>(g), zero_bytes = static_cast<size_t>(4 * bits_of(f)), a_line = 64 / zero_bytes;
    size_t codes = static_cast<size_t>(code_bytes(f)) * static_cast<size_t>(group / kBlock);
    size_t line = has_zeros(f) ? 64 : 0;
    size_t first = n / a_line * (line + a_line * (codes + 64));  // of the groups that share a line
    size_t start = first + line + n % a_line * (codes + 64);
    return {start, start + codes, first + n % a_line * zero_bytes, start + codes + 64};
}

// Row `row` of one matrix of the job as row `i` of a panel that was zeroed before.
void pack_grouped(const PackJob& job, bool second, size_t row, int i, uint8_t* panel) {
    const uint8_t* codes = (second ? job.second : job.first) + row * stored_row_bytes(job.stored, job.columns);
    const float* numbers = job.stored == Stored::F32 ? reinterpret_cast<const float*>(codes) : nullptr;
    const Groups& from = job.groups[second];
    int groups = pad_to(job.columns, kBlock) / job.group;
    bool nibbles = job.stored == Stored::Int4;
    for (int g = 0; g < groups; g++) {
        Place place = place_of(job.format, job.group, g);
        int first = g * job.group, last = std::min(first + job.group, job.columns);
        size_t at = row * static_cast<size_t>(groups) + static_cast<size_t>(g);
        uint16_t scale = numbers ? scale_of(numbers + first, last - first) : half_at(from.scales + 2 * at);
        std::memcpy(panel + place.scales + 2 * i, &scale, 2);
        for (int c = first; c < last; c += kBlock) {
            RowBlock block{};
            for (int k = 0; k < std::min(kBlock, last - c); k++) {
                if (numbers)
                    block.code[k] = code_of(numbers[c + k], half_to_float(scale));
                else
                    block.code[k] = nibbles ? codes[(c + k) / 2] >> (k % 2 * 4) & 15 : codes[c + k] ^ 0x80;
            }
            encode_codes(block, i, job.format, panel + place.codes + (c - first) / kBlock * code_bytes(job.format));
        }
        if (!from.zeros) continue;
        uint8_t *zeros = panel + place.zeros, zero = from.zeros[at];
        if (nibbles)
            zeros[i % 16] |= static_cast<uint8_t>((zero & 15) << (i / 16 * 4));
        else
            zeros[i] = zero;
    }
}

void unpack_grouped(Format format, int group, const uint8_t* panel, int i, int columns, float* out) {
    bool wide = bits_of(format) == 8;
    for (int k = 0, g = 0; k < pad_to(columns, kBlock); g++) {
        Place place = place_of(format, group, g);
        const uint8_t *codes = panel + place.codes + i / kHalfRows * 64 + 4 * (i % kHalfRows), *zeros = panel + place.zeros;
        float scale = half_to_float(half_at(panel + place.scales + 2 * i));
        int zero = wide ? 128 : 8;
        if (format == Format::G8Z) zero += static_cast<int8_t>(zeros[i]);
        if (format == Format::G4Z) zero = zeros[i % 16] >> (i / 16 * 4) & 15;
        for (int end = k + group; k < end; k++) {
            const uint8_t* block = codes + k % group / kBlock * code_bytes(format);
            int s = k % kBlock / 4, byte = k % 4;
            int code = wide ? block[128 * s + byte] : block[128 * (s / 2) + byte] >> (s % 2 * 4) & 15;
            out[k] = scale * static_cast<float>(code - zero);
        }
    }
}

struct Name {
    const char* name;
    int value;
};
const Name kStored[] = {{"Q4_0", 0}, {"Q4_1", 1}, {"Q5_0", 2}, {"Q5_1", 3}, {"Q8_0", 4},
                        {"Q4_K", 5}, {"Q5_K", 6}, {"Q6_K", 7}, {"BF16", 8}, {"F32", 9},
                        {"INT4", 10}, {"INT8", 11}};
const Name kFormatNames[] = {{"q4", 0}, {"q4m", 1}, {"q5", 2}, {"q5m", 3}, {"q6", 4}, {"g8", 10}, {"bf16", 6}, {"f32", 7}};

template <class T, size_t N> bool look_up(const Name (&names)[N], const std::string& name, T* value) {
    for (const Name& entry : names)
        if (name == entry.name) {
            *value = static_cast<T>(entry.value);
            return true;
        }
    return false;
}

}  // namespace

bool stored_of(const std::string& name, Stored* stored) { return look_up(kStored, name, stored); }
bool format_of(const std::string& name, Format* format) { return look_up(kFormatNames, name, format); }

Format native_format(Stored stored, bool zeros) {
    switch (stored) {
        case Stored::Int4: return zeros ? Format::G4Z : Format::G4;
        case Stored::Int8: return zeros ? Format::G8Z : Format::G8;
        case Stored::Q4_0: return Format::Q4;
        case Stored::Q4_1:
        case Stored::Q4_K: return Format::Q4M;
        case Stored::Q5_0: return Format::Q5;
        case Stored::Q5_1:
        case Stored::Q5_K: return Format::Q5M;
        case Stored::Q6_K: return Format::Q6;
        case Stored::Q8_0: return Format::Q8;
        case Stored::BF16: return Format::BF16;
        default: return Format::F32;
    }
}

size_t block_bytes(Format format) {
    if (format == Format::BF16) return 2 * kPanel * kBlock;
    if (format == Format::F32) return 4 * kPanel * kBlock;
    return static_cast<size_t>(code_bytes(format) + 64 * groups_of(format) + (has_minimum(format) ? 64 : 0));
}

size_t panel_bytes(Format format, int columns, int group) {
    if (grouped(format)) return place_of(format, group, pad_to(columns, kBlock) / group - 1).end;
    return block_bytes(format) * static_cast<size_t>(pad_to(columns, kBlock) / kBlock);
}

size_t stored_row_bytes(Stored stored, int columns) {
    size_t n = static_cast<size_t>(columns);
    switch (stored) {
        case Stored::Q4_0: return n / 32 * 18;
        case Stored::Q4_1: return n / 32 * 20;
        case Stored::Q5_0: return n / 32 * 22;
        case Stored::Q5_1: return n / 32 * 24;
        case Stored::Q8_0: return n / 32 * 34;
        case Stored::Q4_K: return n / 256 * 144;
        case Stored::Q5_K: return n / 256 * 176;
        case Stored::Q6_K: return n / 256 * 210;
        case Stored::BF16: return n * 2;
        case Stored::Int4: return n / 2;
        case Stored::Int8: return n;
        default: return n * 4;
    }
}

int panels_of(const PackJob& job) {
    return job.second ? pad_to(job.rows, kHalfRows) / kHalfRows : pad_to(job.rows, kPanel) / kPanel;
}

void pack_panel(const PackJob& job, int panel, uint8_t* out) {
    std::memset(out, 0, panel_bytes(job.format, job.columns, job.group));
    size_t row_bytes = stored_row_bytes(job.stored, job.columns);
    for (int i = 0; i < kPanel; i++) {
        bool second = job.second && i >= kHalfRows;
        int row = job.second ? panel * kHalfRows + i % kHalfRows : panel * kPanel + i;
        if (row >= job.rows) continue;
        if (job.group)
            pack_grouped(job, second, static_cast<size_t>(row), i, out);
        else
            pack_row(job, (second ? job.second : job.first) + static_cast<size_t>(row) * row_bytes, i, out);
    }
}

void unpack_row(Format format, int group, const uint8_t* packed, int row, int columns, float* out) {
    packed += static_cast<size_t>(row / kPanel) * panel_bytes(format, columns, group);
    if (grouped(format)) return unpack_grouped(format, group, packed, row % kPanel, columns, out);
    int i = row % kPanel, lane = i % kHalfRows, bits = bits_of(format), padded = pad_to(columns, kBlock);
    if (format == Format::F32 || format == Format::BF16) {
        for (int k = 0; k < padded; k++) {
            uint32_t word = 0;
            if (format == Format::F32) {
                std::memcpy(&word, packed + (static_cast<size_t>(k) * kPanel + i) * 4, 4);
            } else {
                word = static_cast<uint32_t>(half_at(packed + (static_cast<size_t>(k / 2) * kPanel + i) * 4 + k % 2 * 2)) << 16;
            }
            std::memcpy(out + k, &word, 4);
        }
        return;
    }
    size_t step = block_bytes(format);
    for (int j = 0; j < padded / kBlock; j++, packed += step) {
        const uint8_t *plane = packed + i / kHalfRows * 64, *half = plane + plane_bytes(format);
        const uint8_t* facts = packed + code_bytes(format) + 2 * i;
        float minimum = has_minimum(format) ? half_to_float(half_at(facts + 64 * groups_of(format))) : 0.0f;
        float zero = has_minimum(format) ? 0.0f : static_cast<float>(1 << (bits - 1));
        for (int k = 0; k < kBlock; k++) {
            int s = k / 4, byte = 4 * lane + k % 4;
            int code = bits == 8 ? half[128 * s + byte] : half[128 * (s / 2) + byte] >> (s % 2 * 4) & 15;
            if (bits == 5) code |= (plane[byte] >> s & 1) << 4;
            if (bits == 6) code |= (plane[128 * (s / 4) + byte] >> (s % 4 * 2) & 3) << 4;
            float scale = half_to_float(half_at(facts + 64 * (k / 16 * (groups_of(format) - 1))));
            out[j * kBlock + k] = scale * (static_cast<float>(code) - zero) + minimum;
        }
    }
}

float half_to_float(uint16_t h) {
    uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16, body = h & 0x7fffu, bits;
    if (body >= 0x7c00) {
        bits = body << 13 | 0x7f800000u;  // infinity, NaN
    } else if (body >= 0x400) {
        bits = (body << 13) + (112u << 23);
    } else {
        float x = static_cast<float>(body) * 5.9604644775390625e-8f;  // subnormal: multiples of 2^-24
        std::memcpy(&bits, &x, 4);
    }
    bits |= sign;
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}

uint16_t float_to_half(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000);
    bits &= 0x7fffffff;
    if (bits > 0x7f800000) return sign | 0x7e00;
    if (bits >= 0x477ff000) return sign | 0x7c00;
    if (bits < 0x38800000) {  // subnormal: round to multiples of 2^-24
        float size;
        std::memcpy(&size, &bits, 4);
        return static_cast<uint16_t>(sign | static_cast<uint16_t>(std::nearbyint(size * 16777216.0f)));
    }
    bits += 0xfff + (bits >> 13 & 1);
    return static_cast<uint16_t>(sign | (bits - (112u << 23)) >> 13);
}

}  // namespace octavo
