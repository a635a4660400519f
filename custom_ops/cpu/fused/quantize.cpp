// Dynamic quantization of activations into the GEMM's tile order.
#include "dot.h"
#include "layouts.h"

namespace fastengine {
namespace FE_ISA {
namespace {

constexpr int kVecs = kBlockK / kLanes;

FE_INLINE Vec vabs(Vec x) { return vmax(x, vsub(vzero(), x)); }

// 32 values of a row, the row's factor and the columns' weights applied. Masks take as long as the rest: most blocks need none.
FE_INLINE void load_block(const TileSource& s, int64_t row, int64_t block, Vec* out) {
  const float* const values = s.x + row * s.stride - s.first;
  const int64_t first = block * kBlockK;
  if (first + kBlockK <= s.k) {
    for (int i = 0; i < kVecs; ++i) out[i] = vload(values + first + i * kLanes);
    for (int i = 0; s.weight != nullptr && i < kVecs; ++i) out[i] = vmul(vmul(out[i], vset(s.factors[row])), vload(s.weight + first + i * kLanes));
    return;
  }
  for (int i = 0; i < kVecs; ++i) {
    const int64_t at = first + i * kLanes, lanes = max_i(0, min_i(kLanes, s.k - at));
    out[i] = vload_n(values + at, lanes);
    if (s.weight != nullptr) out[i] = vmul(vmul(out[i], vset(s.factors[row])), vload_n(s.weight + at, lanes));
  }
}

// 32 values as s8, and their sum.
#if defined(__AVX512F__)
FE_INLINE int32_t to_bytes(const Vec* x, Vec inverse, int32_t* dwords) {
  const __m512i a = _mm512_cvtps_epi32(vmul(x[0], inverse)), b = _mm512_cvtps_epi32(vmul(x[1], inverse));
  _mm_store_si128(reinterpret_cast<__m128i*>(dwords), _mm512_cvtsepi32_epi8(a));
  _mm_store_si128(reinterpret_cast<__m128i*>(dwords + 4), _mm512_cvtsepi32_epi8(b));
  return _mm512_reduce_add_epi32(_mm512_add_epi32(a, b));
}
#else
// Quads 0, 2, 4, 6 in the low half, 1, 3, 5, 7 in the high one; the sum of all lanes of `sums` is theirs.
FE_INLINE IVec to_quads(const Vec* x, Vec inverse, IVec* sums) {
  IVec q[kVecs];
  for (int i = 0; i < kVecs; ++i) q[i] = _mm256_cvtps_epi32(vmul(x[i], inverse));
  *sums = _mm256_add_epi32(_mm256_add_epi32(q[0], q[1]), _mm256_add_epi32(q[2], q[3]));
  return _mm256_packs_epi16(_mm256_packs_epi32(q[0], q[1]), _mm256_packs_epi32(q[2], q[3]));
}

// And in order.
FE_INLINE IVec to_dwords(const Vec* x, Vec inverse, IVec* sums) {
  return _mm256_permutevar8x32_epi32(to_quads(x, inverse, sums), _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

FE_INLINE int32_t to_bytes(const Vec* x, Vec inverse, int32_t* dwords) {
  IVec sums;
  istore(dwords, to_dwords(x, inverse, &sums));
  __m128i sum = _mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
  sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0xb1)));
}
#endif

// Where a tile's rows lie.
struct TileTarget {
  int64_t num_rows;
  int32_t* values;
  float *scales, *sums;
  int32_t* starts;
};

TileTarget target_of(const Activations& out, int64_t tile) {
  const int64_t row = tile * kTileRows, at = row * (out.padded_k / kBlockK);
  return {rows_of_tile(out.num_rows, tile), reinterpret_cast<int32_t*>(out.values + row * out.padded_k), out.scales + row * out.num_groups(), out.sums + at, out.starts + at};
}

// One row's part of a group of kBlocks blocks.
template <int kBlocks>
void quantize_alone(const TileSource& s, int64_t row, int64_t block, int64_t group, const TileTarget& t) {
  Vec x[kBlocks][kVecs], most = vzero();
  for (int b = 0; b < kBlocks; ++b) {
    load_block(s, row, block + b, x[b]);
    for (int i = 0; i < kVecs; ++i) most = vmax(most, vabs(x[b][i]));
  }
  const float largest = vmaximum(most), scale = largest * (1.0f / 127.0f);
  const Vec inverse = vset(largest > 0.0f ? 127.0f / largest : 0.0f);
  t.scales[group * t.num_rows + row] = scale;
  for (int b = 0; b < kBlocks; ++b) {
    alignas(16) int32_t dwords[kBlockK / 4];
    const int32_t sum = to_bytes(x[b], inverse, dwords);
    int32_t* const values = t.values + (block + b) * kBlockK / 4 * t.num_rows + row;
    for (int i = 0; i < kBlockK / 4; ++i) values[i * t.num_rows] = dwords[i];
    const int64_t at = (block + b) * t.num_rows + row;
    t.sums[at] = scale * static_cast<float>(sum);
    t.starts[at] = kMagicBits - 128 * sum;
  }
}

#if defined(__AVX512F__)
FE_INLINE Vec max_of_halves(Vec a, Vec b, bool dwords) {
  if (dwords) return vmax(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  const __m512d x = _mm512_castps_pd(a), y = _mm512_castps_pd(b);
  return vmax(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)), _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
}
FE_INLINE Vec max_of_quarters(Vec a, Vec b) { return vmax(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd)); }

// Lane r: the largest lane of x[r].
FE_INLINE Vec largest_of_rows(const Vec* x) {
  Vec fours[4];
  for (int i = 0; i < 4; ++i) fours[i] = max_of_halves(max_of_halves(x[4 * i], x[4 * i + 1], true), max_of_halves(x[4 * i + 2], x[4 * i + 3], true), false);
  return max_of_quarters(max_of_quarters(fours[0], fours[1]), max_of_quarters(fours[2], fours[3]));
}

FE_INLINE __m512i pick(__m512i a, __m512i b, bool odd) {
  const Vec x = _mm512_castsi512_ps(a), y = _mm512_castsi512_ps(b);
  return _mm512_castps_si512(odd ? _mm512_shuffle_ps(x, y, 0xdd) : _mm512_shuffle_ps(x, y, 0x88));
}

// Lane i of out[j] is lane j of x[i], lanes of 128 bits.
FE_INLINE void transpose_quarters(const __m512i* x, __m512i* out) {
  const __m512i a = _mm512_shuffle_i32x4(x[0], x[1], 0x44), b = _mm512_shuffle_i32x4(x[2], x[3], 0x44);
  const __m512i c = _mm512_shuffle_i32x4(x[0], x[1], 0xee), d = _mm512_shuffle_i32x4(x[2], x[3], 0xee);
  out[0] = _mm512_shuffle_i32x4(a, b, 0x88), out[1] = _mm512_shuffle_i32x4(a, b, 0xdd);
  out[2] = _mm512_shuffle_i32x4(c, d, 0x88), out[3] = _mm512_shuffle_i32x4(c, d, 0xdd);
}

// A block of 16 rows, transposed on the way.
void put_together(const float (&x)[kTileRows][kBlockK], const float* inverses, Vec scale, int64_t block, const TileTarget& t) {
  __m512i pairs[kTileRows / 2];  // in each quarter q: quads q and q + 4 of the even row, then of the odd one
  for (int r = 0; r < kTileRows; r += 2) {
    __m512i words[2];
    for (int u = 0; u < 2; ++u) {
      const Vec inverse = vset(inverses[r + u]);
      words[u] = _mm512_packs_epi32(_mm512_cvtps_epi32(vmul(vload(x[r + u]), inverse)), _mm512_cvtps_epi32(vmul(vload(x[r + u] + kLanes), inverse)));
    }
    pairs[r / 2] = _mm512_packs_epi16(words[0], words[1]);
  }
  __m512i quads[kBlockK / 4];
  for (int half = 0; half < 2; ++half) {
    __m512i rows[4];
    for (int i = 0; i < 4; ++i) rows[i] = pick(pairs[2 * i], pairs[2 * i + 1], half == 1);
    transpose_quarters(rows, quads + 4 * half);
  }
  const __mmask16 there = lane_mask(t.num_rows);
  __m512i sum = _mm512_setzero_si512();
  for (int q = 0; q < kBlockK / 4; ++q) {
    _mm512_mask_storeu_epi32(t.values + (block * (kBlockK / 4) + q) * t.num_rows, there, quads[q]);
    sum = _mm512_dpbusd_epi32(sum, _mm512_set1_epi8(1), quads[q]);
  }
  const int64_t at = block * t.num_rows;
  vstore_n(t.sums + at, vmul(scale, _mm512_cvtepi32_ps(sum)), t.num_rows);
  _mm512_mask_storeu_epi32(t.starts + at, there, _mm512_sub_epi32(_mm512_set1_epi32(kMagicBits), _mm512_slli_epi32(sum, 7)));
}

// What quantize_alone() does of each row, of 16 rows at once.
template <int kBlocks>
void quantize_together(const TileSource& s, int64_t block, int64_t group, const TileTarget& t) {
  alignas(64) float x[kBlocks][kTileRows][kBlockK];
  Vec most[kTileRows];
  for (int64_t r = 0; r < kTileRows; ++r) {
    for (int b = 0; b < kBlocks; ++b) {
      Vec values[kVecs];
      load_block(s, min_i(r, t.num_rows - 1), block + b, values);
      for (int i = 0; i < kVecs; ++i) vstore(x[b][r] + i * kLanes, values[i]);
      const Vec larger = vmax(vabs(values[0]), vabs(values[1]));
      most[r] = b == 0 ? larger : vmax(most[r], larger);
    }
  }
  const Vec largest = largest_of_rows(most), scale = vmul(largest, vset(1.0f / 127.0f));
  alignas(64) float inverses[kTileRows];
  vstore(inverses, _mm512_maskz_div_ps(_mm512_cmp_ps_mask(largest, vzero(), _CMP_GT_OQ), vset(127.0f), largest));
  vstore_n(t.scales + group * t.num_rows, scale, t.num_rows);
  for (int b = 0; b < kBlocks; ++b) put_together(x[b], inverses, scale, block + b, t);
}

constexpr int64_t kTogetherFrom = 4;  // rows
#else
// Lane r: all lanes of x[r] folded into one, in the order of vmaximum().
template <typename Fold>
FE_INLINE Vec across_rows(const Vec* x, const Fold& fold) {
  Vec halves[4], pairs[2];
  for (int i = 0; i < 4; ++i) halves[i] = fold(_mm256_permute2f128_ps(x[i], x[i + 4], 0x20), _mm256_permute2f128_ps(x[i], x[i + 4], 0x31));
  for (int i = 0; i < 2; ++i) {
    const __m256d a = _mm256_castps_pd(halves[2 * i]), b = _mm256_castps_pd(halves[2 * i + 1]);
    pairs[i] = fold(_mm256_castpd_ps(_mm256_unpacklo_pd(a, b)), _mm256_castpd_ps(_mm256_unpackhi_pd(a, b)));
  }
  return fold(_mm256_shuffle_ps(pairs[0], pairs[1], 0x88), _mm256_shuffle_ps(pairs[0], pairs[1], 0xdd));
}

FE_INLINE Vec largest_of_rows(const Vec* x) {
  return across_rows(x, [](Vec a, Vec b) { return vmax(a, b); });
}
FE_INLINE IVec sums_of_rows(const Vec* x) {
  return _mm256_castps_si256(across_rows(x, [](Vec a, Vec b) { return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(a), _mm256_castps_si256(b))); }));
}

// Of four rows as to_quads() has them: out[i] has quad 2 i of all four, then quad 2 i + 1.
FE_INLINE void transpose_rows(const IVec* x, IVec* out) {
  const IVec a = _mm256_unpacklo_epi32(x[0], x[1]), b = _mm256_unpacklo_epi32(x[2], x[3]);
  const IVec c = _mm256_unpackhi_epi32(x[0], x[1]), d = _mm256_unpackhi_epi32(x[2], x[3]);
  out[0] = _mm256_unpacklo_epi64(a, b), out[1] = _mm256_unpackhi_epi64(a, b);
  out[2] = _mm256_unpacklo_epi64(c, d), out[3] = _mm256_unpackhi_epi64(c, d);
}

FE_INLINE Vec inverses_of(Vec largest) { return _mm256_and_ps(vdiv(vset(127.0f), largest), _mm256_cmp_ps(largest, vzero(), _CMP_GT_OQ)); }
FE_INLINE IVec starts_of(IVec sums) { return _mm256_sub_epi32(iset(kMagicBits), _mm256_slli_epi32(sums, 7)); }

// Up to 8 rows of a tile, from `first` on, and where their values lie, rows `stride` apart.
struct RowsTogether {
  const float* x;
  int64_t stride, first, count;
};

// A block of these rows, transposed on the way.
FE_INLINE void put_together(const RowsTogether& rows, const float* inverses, Vec scale, int64_t block, const TileTarget& t) {
  IVec packed[kLanes], low[4], high[4];
  Vec lanes_added[kLanes];
  for (int64_t r = 0; r < kLanes; ++r) {
    Vec values[kVecs];
    IVec added;
    const float* const x = rows.x + min_i(r, rows.count - 1) * rows.stride;
    for (int i = 0; i < kVecs; ++i) values[i] = vload(x + i * kLanes);
    packed[r] = to_quads(values, vset(inverses[r]), &added);
    lanes_added[r] = _mm256_castsi256_ps(added);
  }
  transpose_rows(packed, low);
  transpose_rows(packed + 4, high);
  int32_t* const target = t.values + block * (kBlockK / 4) * t.num_rows + rows.first;
  for (int q = 0; q < kBlockK / 4; ++q) {
    const IVec quad = _mm256_permute2x128_si256(low[q / 2], high[q / 2], q % 2 == 0 ? 0x20 : 0x31);
    // Lanes without a row fall on what is written after them: the block's next quads, and rows before these.
    if (q + 1 < kBlockK / 4) {
      istore(target + q * t.num_rows, quad);
    } else {
      istore_n(target + q * t.num_rows, quad, rows.count);
    }
  }
  const IVec sums = sums_of_rows(lanes_added);
  const int64_t at = block * t.num_rows + rows.first;
  vstore_n(t.sums + at, vmul(scale, to_floats(sums)), rows.count);
  istore_n(t.starts + at, starts_of(sums), rows.count);
}

constexpr int64_t kTogetherFrom = 5;  // rows: as quick as five one by one, and a block's last two quads fill a vector

// What quantize_alone() does of each row, of 8 rows at once, the last ones first.
template <int kBlocks>
void quantize_together(const TileSource& s, int64_t block, int64_t group, const TileTarget& t) {
  constexpr int64_t kValues = kBlocks * kBlockK;
  alignas(32) float x[kTileRows][kValues];
  Vec most[kTileRows];
  const bool as_they_are = s.weight == nullptr && block * kBlockK + kValues <= s.k;
  const float* const source = s.x + block * kBlockK - s.first;
  for (int64_t r = 0; r < t.num_rows; ++r) {
    Vec largest = vzero();
    if (as_they_are) {
      for (int i = 0; i < kBlocks * kVecs; ++i) largest = vmax(largest, vabs(vload(source + r * s.stride + i * kLanes)));
    } else {
      for (int b = 0; b < kBlocks; ++b) {
        Vec values[kVecs];
        load_block(s, r, block + b, values);
        for (int i = 0; i < kVecs; ++i) vstore(x[r] + b * kBlockK + i * kLanes, values[i]), largest = vmax(largest, vabs(values[i]));
      }
    }
    most[r] = largest;
  }
  for (int64_t r = t.num_rows; r % kLanes != 0; ++r) most[r] = vzero();
  for (int64_t first = (t.num_rows - 1) / kLanes * kLanes; first >= 0; first -= kLanes) {
    const Vec largest = largest_of_rows(most + first), scale = vmul(largest, vset(1.0f / 127.0f));
    alignas(32) float inverses[kLanes];
    vstore(inverses, inverses_of(largest));
    RowsTogether rows{x[first], kValues, first, min_i(kLanes, t.num_rows - first)};
    if (as_they_are) rows.x = source + first * s.stride, rows.stride = s.stride;
    vstore_n(t.scales + group * t.num_rows + first, scale, rows.count);
    for (int b = 0; b < kBlocks; ++b, rows.x += kBlockK) put_together(rows, inverses, scale, block + b, t);
  }
}

// What quantize_alone() does of 8 groups of a single row, whose blocks follow each other in all arrays.
template <int kBlocks>
void quantize_run(const TileSource& s, int64_t block, int64_t group, const TileTarget& t) {
  alignas(32) float x[kBlocks * kLanes][kBlockK];
  Vec most[kLanes];
  for (int b = 0; b < kBlocks * kLanes; ++b) {
    Vec values[kVecs], &largest = most[b / kBlocks];
    load_block(s, 0, block + b, values);
    if (b % kBlocks == 0) largest = vzero();
    for (int i = 0; i < kVecs; ++i) vstore(x[b] + i * kLanes, values[i]), largest = vmax(largest, vabs(values[i]));
  }
  const Vec largest = largest_of_rows(most), scale = vmul(largest, vset(1.0f / 127.0f));
  alignas(32) float inverses[kLanes];
  vstore(inverses, inverses_of(largest));
  vstore(t.scales + group, scale);
  for (int first = 0; first < kBlocks * kLanes; first += kLanes) {
    Vec lanes_added[kLanes];
    for (int b = first; b < first + kLanes; ++b) {
      Vec values[kVecs];
      IVec added;
      for (int i = 0; i < kVecs; ++i) values[i] = vload(x[b] + i * kLanes);
      istore(t.values + (block + b) * (kBlockK / 4), to_dwords(values, vset(inverses[b / kBlocks]), &added));
      lanes_added[b - first] = _mm256_castsi256_ps(added);
    }
    const IVec sums = sums_of_rows(lanes_added), groups = _mm256_srli_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), kBlocks - 1);
    const Vec scales = _mm256_permutevar8x32_ps(scale, _mm256_add_epi32(groups, iset(first / kBlocks)));
    vstore(t.sums + block + first, vmul(scales, to_floats(sums)));
    istore(t.starts + block + first, starts_of(sums));
  }
}
#endif

template <int kBlocks>
void quantize_group(const TileSource& source, int64_t block, int64_t group, const TileTarget& t) {
  if (t.num_rows >= kTogetherFrom) return quantize_together<kBlocks>(source, block, group, t);
  for (int64_t row = 0; row < t.num_rows; ++row) quantize_alone<kBlocks>(source, row, block, group, t);
}

void copy_group(const TileSource& source, int64_t tile, int64_t block, int64_t blocks, const Activations& out) {
  for (int64_t row = 0; row < rows_of_tile(out.num_rows, tile); ++row) {
    for (int64_t b = block; b < block + blocks; ++b) {
      Vec values[kVecs];
      load_block(source, row, b, values);
      for (int i = 0; i < kVecs; ++i) vstore(out.rows + (tile * kTileRows + row) * out.padded_k + b * kBlockK + i * kLanes, values[i]);
    }
  }
}

// kLanes rows of a tile of `stride` rows, of which `lanes` are there. The unit is such that the products' sum can't overflow.
void pair_sums(const float* sums, int64_t num_blocks, int64_t stride, int64_t lanes, int32_t* pairs, float* units) {
  Vec most = vzero(), totals[4] = {vzero(), vzero(), vzero(), vzero()};
  for (int64_t b = 0; b < num_blocks; ++b) {
    const Vec size = vabs(vload_n(sums + b * stride, lanes));
    most = vmax(most, size);
    totals[b % 4] = vadd(totals[b % 4], size);
  }
  const Vec total = vadd(vadd(totals[0], totals[1]), vadd(totals[2], totals[3]));
  // Where a sum is not finite, neither is the unit: of its operands the maximum takes the second then.
  const Vec unit = vmax(vmul(most, vset(1.0f / 32767.0f)), vmul(total, vset(1.0f / static_cast<float>(kMostSums))));
  vstore_n(units, unit, lanes);
  const Vec inverse = vdiv(vset(1.0f), vmax(unit, vset(1e-30f)));
  for (int64_t b = 0; b < num_blocks; b += 2) {
    const Vec low = vmul(vload_n(sums + b * stride, lanes), inverse);
    const Vec high = b + 1 < num_blocks ? vmul(vload_n(sums + (b + 1) * stride, lanes), inverse) : vzero();
    istore_n(pairs + b / 2 * stride, in_pairs(low, high), lanes);
  }
}

}  // namespace

int64_t sum_pairs_bytes(int64_t num_rows, int64_t padded_k) { return num_rows * (ceil_div(padded_k, 2 * kBlockK) + 1) * static_cast<int64_t>(sizeof(int32_t)); }

void make_sum_pairs(Activations* a, uint8_t* memory) {
  const int64_t num_blocks = a->padded_k / kBlockK, num_pairs = ceil_div(num_blocks, 2);
  a->sum_units = reinterpret_cast<float*>(memory);
  a->sum_pairs = reinterpret_cast<int32_t*>(a->sum_units + a->num_rows);
  for (int64_t row = 0; row < a->num_rows; row += kTileRows) {
    const int64_t num_rows = min_i(kTileRows, a->num_rows - row);
    for (int64_t r = 0; r < num_rows; r += kLanes) {
      pair_sums(a->sums + row * num_blocks + r, num_blocks, num_rows, min_i(kLanes, num_rows - r), a->sum_pairs + row * num_pairs + r, a->sum_units + row + r);
    }
  }
}

void quantize_tile(const TileSource& source, int64_t tile, int64_t first_group, int64_t last_group, const Activations& out) {
  const TileTarget target = target_of(out, tile);
  const int64_t num_blocks = out.padded_k / kBlockK;
  int64_t group = first_group;
#if !defined(__AVX512F__)
  for (; out.quantized && target.num_rows == 1 && group + kLanes <= last_group && (group + kLanes) * out.group_blocks <= num_blocks; group += kLanes) {
    const int64_t block = group * out.group_blocks;
    out.group_blocks == 1 ? quantize_run<1>(source, block, group, target) : quantize_run<2>(source, block, group, target);
  }
#endif
  for (; group < last_group; ++group) {
    const int64_t block = group * out.group_blocks, blocks = min_i(out.group_blocks, num_blocks - block);
    if (!out.quantized) {
      copy_group(source, tile, block, blocks, out);
    } else if (blocks == 1) {
      quantize_group<1>(source, block, group, target);
    } else {
      quantize_group<2>(source, block, group, target);
    }
  }
}

}  // namespace FE_ISA
}  // namespace fastengine
