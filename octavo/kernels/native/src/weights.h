// Packed weights: how matrices lie in memory, packing from the form they are stored in, and reading rows back.
//
// A matrix is cut into panels of 32 rows (zero rows at the end) and blocks of 32 columns (zero columns at the end);
// a panel holds its blocks one after the other. A block of an integer format consists of pairs of 64-byte vectors, the
// first of a pair for rows 0-15, the second for rows 16-31, in the order in which products read them:
//
//   Q5*            first one pair whose bit s is bit 4 of column 4 s + c of row i, at byte 4 i + c
//   Q6             first two pairs whose bits 2 (s % 4) and up of pair s / 4 are bits 4-5 of column 4 s + c
//   Q4*, Q5*, Q6   4 pairs: byte 4 i + c of pair j holds columns 8 j + c (low bits) and 8 j + 4 + c (high bits), 4 bits
//                  each
//   Q8             8 pairs: byte 4 i + c of pair s holds column 4 s + c plus 128
//
// then half precision scales of 32 rows (Q6: for columns 0-15, then 16-31), and for Q4M and Q5M half precision minima.
// A weight is scale * (code - zero) with zero 8, 16, 32, 128 (Q4, Q5, Q6, Q8), or scale * code + minimum.
//
// G4* and G8*: one scale for `group` columns, a multiple of 32. A panel holds for each group the pairs of its blocks as
// Q4 and Q8 have them, then half precision scales of 32 rows. For G4Z and G8Z a line of 64 bytes comes before every
// fourth or second group and holds the zeros of these groups, 16 or 32 bytes each: byte i those of rows i (low bits) and
// 16 + i (high bits), or that of row i, signed. (So all is read in one stream.)
// A weight is scale * (code - zero) with zero 8, the stored one, 128, 128 + the stored one (G4, G4Z, G8, G8Z).
//
// A block of BF16 is 16 pairs of columns, 32 rows of pairs each; of F32 32 columns, 32 rows each.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "kernels.h"

namespace octavo {

// How a matrix lies in a file: GGUF block types, plain numbers, or codes whose scales lie apart: two of 4 bits a byte,
// the even column in the low bits, or signed bytes.
enum class Stored : int { Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K, BF16, F32, Int4, Int8 };

bool stored_of(const std::string& name, Stored* stored);
bool format_of(const std::string& name, Format* format);

// The format that keeps every value of `stored` (scales of the K types are rounded to half precision); for codes
// whose scales lie apart with or without zeros.
Format native_format(Stored stored, bool zeros = false);

size_t block_bytes(Format format);
size_t panel_bytes(Format format, int columns, int group);
size_t stored_row_bytes(Stored stored, int columns);

// Scales (half precision) and zeros (bytes, or null) of the groups of a row, rows one after the other.
struct Groups {
    const uint8_t *scales, *zeros;
};

// Rows of a matrix or of two interleaved ones: panel p holds rows 32 p .. 32 p + 31 of `first`, or, when there is a
// `second`, rows 16 p .. 16 p + 15 of each.
struct PackJob {
    const uint8_t *first, *second;
    Stored stored;
    int rows, columns;  // of each matrix
    Format format;      // native_format(stored); or Q4M, G8, BF16 or F32 when stored is F32
    int group;          // columns that share a scale, a multiple of 32 that divides the padded columns; 0: none lie apart
    Groups groups[2];   // of `first` and `second`
    bool mapped;        // the bytes lie in a mapped file; pages that were read can be given back
};
int panels_of(const PackJob& job);
// Writes panel `panel` (panel_bytes) to `out`.
void pack_panel(const PackJob& job, int panel, uint8_t* out);

// Row `row` of a packed matrix as float32; `out` gets the padded number of columns.
void unpack_row(Format format, int group, const uint8_t* packed, int row, int columns, float* out);

float half_to_float(uint16_t h);
uint16_t float_to_half(float x);

}  // namespace octavo
