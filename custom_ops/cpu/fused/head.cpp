// The LM head, whole, or for a few greedy rows through its screen.
//
// The screen is the head in four bits. From it come coarse logits, and for every strip of columns the highest that one of
// its exact logits may be; strips in which that is below an exact logit are left out, the others are computed as always. A column's
// coarse logit is off by the sum over k of error_k * x_k, of errors that are independent and uniform within half a step
// (derive_screen()): such a sum exceeds z standard deviations with a probability below e^(-z^2 / 2), whatever the weights
// and x are. That of the row's largest |x|, which often stands out, is counted apart, with the most it can be. A token is
// wrong when this happens to the column of the largest logit: with kDeviations, less than once in 1e12 tokens. What the GEMM
// rounds of the sums that minima are multiplied by is counted with the most it can be, too.
#include "head.h"

#include "dot.h"
#include "gemm_run.h"
#include "layouts.h"

namespace fastengine {
namespace FE_ISA {
namespace {

constexpr float kDeviations = 7.5f;
// States this small or large may underflow or overflow on the way: nothing is left out then.
constexpr float kLeastScale = 1e-20f, kLargestScale = 1e30f;
// Strips that a thread looks through at a time. The tokens that come often, and may win often, have neighbouring ids.
constexpr int64_t kStripsAtOnce = 16;

// The square root of x >= 0, to 4e-4 of it.
FE_INLINE Vec rough_root(Vec x) {
  const Vec positive = vmax(vset(1e-30f), x);
#if defined(__AVX512F__)
  return vmul(x, _mm512_rsqrt14_ps(positive));
#else
  return vmul(x, _mm256_rsqrt_ps(positive));
#endif
}

struct Head {
  const ModelView& m;
  const StepArgs& s;
  const Workspace& w;
  uint8_t* scratch;

  float* best_values(const Member& me) const { return w.best_values + me.index * s.num_samples; }
  int32_t* best_ids(const Member& me) const { return w.best_ids + me.index * s.num_samples; }

  // `width` columns from `first` on. They come in any order: of equal values the lowest id wins.
  void take_best(const float* row, int64_t first, int64_t width, float* value, int32_t* id) const {
    const int64_t columns = min_i(width, m.shape.vocab - first);
    Vec most = vset(-3.4e38f);
    for (int64_t v = 0; v < columns; v += kLanes) most = vmax(most, vkeep_n(vload(row + v), min_i(kLanes, columns - v), vset(-3.4e38f)));
    const float largest = vmaximum(most);
    if (largest < *value) return;
    for (int64_t i = 0; i < columns; ++i) {
      const int32_t candidate = static_cast<int32_t>(first + i);
      if (row[i] > *value || (row[i] == *value && candidate < *id)) *value = row[i], *id = candidate;
    }
  }

  void compute_whole(Member& me) const {
    const int64_t vocab = m.shape.vocab;
    const auto nothing = [](int64_t, int64_t, int64_t) {};
    run_gemm<1>(me, m.head, for_linear(w.head, m.head), scratch, nothing, [&](int64_t first, int64_t n, int64_t panel, const float (*values)[kChunkRows * kPanel]) {
      const int64_t columns = min_i(kPanel, vocab - panel * kPanel);
      for (int64_t r = 0; r < n; ++r) {
        const float* const row = values[0] + r * kPanel;
        if (s.logits != nullptr) {
          float* const target = s.logits + (first + r) * vocab + panel * kPanel;
          for (int64_t v = 0; v < columns; v += kLanes) vstore_n(target + v, vload(row + v), min_i(kLanes, columns - v));
        }
        if (s.token_out != nullptr) take_best(row, panel * kPanel, kPanel, best_values(me) + first + r, best_ids(me) + first + r);
      }
    });
  }

  // What the rows' coarse logits are shifted by, and may be off by.
  void prepare(Member& me) const {
    Activations a = w.head;
    const int64_t num_rows = s.num_samples, num_blocks = a.padded_k / kBlockK;
    bool has_pairs = false;
    for_tasks(me, num_rows, 1, [&](int64_t r, int64_t) {
      if (!has_pairs) make_sum_pairs(&a, scratch);
      has_pairs = true;
      int64_t outlier = 0;
      for (int64_t b = 1; b < num_blocks; ++b) outlier = a.scales[b * num_rows + r] > a.scales[outlier * num_rows + r] ? b : outlier;
      // Relative to this scale, so that no square is too small for a float. Without any, 0 / 0 lets nothing be left out.
      const float largest = a.scales[outlier * num_rows + r], limit = largest > kLeastScale && largest < kLargestScale ? largest : __builtin_nanf("");
      for (int64_t b = 0; b < num_blocks; ++b) {
        int32_t energy = b == outlier ? -127 * 127 : 0;
        float dithers = 0.0f;
        for (int64_t i = 0; i < kBlockK; ++i) {
          const int32_t value = a.values[((b * kBlockK + i) / 4 * num_rows + r) * 4 + i % 4];
          energy += value * value;
          dithers += screen_dither(static_cast<uint32_t>(b * kBlockK + i)) * static_cast<float>(value);
        }
        const float scale = a.scales[b * num_rows + r], relative = kDeviations * scale / limit;
        w.screening.shifts[b * num_rows + r] = -dithers * scale;
        w.screening.energies[b * num_rows + r] = relative * relative * static_cast<float>(max_i(energy, 0)) * (1.0f / 12.0f);
      }
      w.screening.scales[r] = limit;
      w.screening.rounded[r] = static_cast<float>(kMostMinimum * num_blocks) * 0.51f * a.sum_units[r];
      w.screening.outliers[r] = outlier;
    });
  }

  // A block's part of the rows' shifts and variances, of as many columns as `step` has.
  template <int kRows>
  __attribute__((always_inline)) static void add_block(Vec step, const float* shifts, const float* energies, Vec* values, Vec* variances) {
    const Vec square = vmul(step, step);
    for (int r = 0; r < kRows; ++r) {
      values[r] = vfma(step, vset(shifts[r]), values[r]);
      variances[r] = vfma(square, vset(energies[r]), variances[r]);
    }
  }

  // From coarse logits of a panel, of rows from `row` on. A NaN counts as infinite.
  template <int kRows>
  void bound(int64_t row, int64_t panel, const float* coarse) const {
    const int64_t num_blocks = m.screen.padded_k / kBlockK, num_rows = s.num_samples;
    const uint8_t* const first = m.screen.weights + panel * m.screen.panel_bytes;
    const int64_t num_groups = ceil_div(num_blocks, 2);
    const uint8_t *const steps = first + int4_steps_at(num_groups), *const scales = first + int4_groups_at(num_groups) + kScalesAt;
    const auto step_of = [&](int64_t b, int64_t column) { return vmul(halves(scales + b / 2 * kInt4GroupBytes + column * 2), to_floats(steps_of(steps + b / 2 * kPanel + column, b % 2))); };
    const float *const energies = w.screening.energies + row, *const shifts = w.screening.shifts + row;
    for (int64_t strip = 0; strip < kPanel / kStrip; ++strip) {
      Vec likely[kRows], highest[kRows];
      for (int r = 0; r < kRows; ++r) likely[r] = highest[r] = vset(-3.4e38f);
      for (int64_t v = strip * kStrip; v < (strip + 1) * kStrip; v += kLanes) {
        const Vec unit = vload(reinterpret_cast<const float*>(first) + v);
        Vec values[kRows], variances[kRows];
        for (int r = 0; r < kRows; ++r) values[r] = vload(coarse + r * kPanel + v), variances[r] = vzero();
        // Reading goes on while bounds are computed, from where the GEMM has asked for the next panel's weights.
        int64_t b = 0;
        // Of vectors this short, both steps of a group come from one reading.
        for (; kLanes == 8 && b + 2 <= num_blocks; b += 2) {
          const Vec scale = halves(scales + b / 2 * kInt4GroupBytes + v * 2);
          const IVec both = bytes_as_integers(steps + b / 2 * kPanel + v);
          ask_ahead(first + m.screen.panel_bytes + (v / kLanes * num_blocks + b) * 64);
          add_block<kRows>(vmul(scale, to_floats(bytes_and(both, 15))), shifts + b * num_rows, energies + b * num_rows, values, variances);
          ask_ahead(first + m.screen.panel_bytes + (v / kLanes * num_blocks + b + 1) * 64);
          add_block<kRows>(vmul(scale, to_floats(shift_right_4(both))), shifts + (b + 1) * num_rows, energies + (b + 1) * num_rows, values, variances);
        }
        for (; b < num_blocks; ++b) {
          ask_ahead(first + m.screen.panel_bytes + (v / kLanes * num_blocks + b) * 64);
          add_block<kRows>(step_of(b, v), shifts + b * num_rows, energies + b * num_rows, values, variances);
        }
        for (int r = 0; r < kRows; ++r) {
          const Vec outlier = step_of(w.screening.outliers[row + r], v);
          const Vec rounded = vfma(unit, vset(w.screening.rounded[row + r]), values[r]);
          const Vec most = vfma(vfma(outlier, vset(127.0f / 2), rough_root(variances[r])), vset(w.screening.scales[row + r]), rounded);
          likely[r] = vmax(values[r], likely[r]);
          highest[r] = vmax(highest[r], vmin(most, vset(__builtin_inff())));
        }
      }
      for (int r = 0; r < kRows; ++r) {
        const int64_t at = (row + r) * num_strips() + panel * (kPanel / kStrip) + strip;
        w.screening.likely[at] = vmaximum(likely[r]);
        w.screening.highest[at] = vmaximum(highest[r]);
      }
    }
  }

  void screen(Member& me) const {
    const auto nothing = [](int64_t, int64_t, int64_t) {};
    run_gemm<1>(me, m.screen, for_linear(w.head, m.screen), scratch, nothing, [&](int64_t, int64_t n, int64_t panel, const float (*values)[kChunkRows * kPanel]) {
      int64_t r = 0;
      for (; r + 4 <= n; r += 4) bound<4>(r, panel, values[0] + r * kPanel);
      for (; r < n; ++r) bound<1>(r, panel, values[0] + r * kPanel);
    });
  }

  int64_t num_strips() const { return m.screen.num_panels * (kPanel / kStrip); }

  // Of all rows.
  void compute_strip(const Member& me, int64_t strip) const {
    alignas(64) float values[kTileRows * kStrip];
    int8_strip(m.head.weights + strip / 2 * m.head.panel_bytes, strip % 2, w.head, values);
    for (int64_t r = 0; r < s.num_samples; ++r) take_best(values + r * kStrip, strip * kStrip, kStrip, best_values(me) + r, best_ids(me) + r);
  }

  bool may_win(const Member& me, int64_t strip) const {
    bool may = false;
    for (int64_t r = 0; r < s.num_samples; ++r) may |= !(w.screening.highest[r * num_strips() + strip] < best_values(me)[r]);
    return may;
  }

  int64_t likeliest(int64_t row) const {
    const float* const likely = w.screening.likely + row * num_strips();
    Vec most = vset(-3.4e38f);
    for (int64_t i = 0; i < num_strips(); i += kLanes) most = vmax(most, vload_n(likely + i, min_i(kLanes, num_strips() - i)));
    const float largest = vmaximum(most);
    for (int64_t i = 0; i < num_strips(); ++i) {
      if (likely[i] == largest) return i;
    }
    return 0;
  }

  void compute_what_may_win(Member& me) const {
    // Every thread by itself: quicker than to wait for another's.
    for (int64_t r = 0; r < s.num_samples; ++r) compute_strip(me, likeliest(r));
    for_tasks(me, num_strips(), kStripsAtOnce, [&](int64_t first, int64_t last) {
      for (int64_t strip = first; strip < last; ++strip) {
        if (may_win(me, strip)) compute_strip(me, strip);
      }
    });
  }
};

}  // namespace

void compute_head(Member& me, const ModelView& m, const StepArgs& s, const Workspace& w, uint8_t* scratch) {
  const Head head{m, s, w, scratch};
  if (!w.screening.used) return head.compute_whole(me);
  head.prepare(me);
  head.screen(me);
  head.compute_what_may_win(me);
}

}  // namespace FE_ISA
}  // namespace fastengine
