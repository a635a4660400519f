// One step of a dense decoder over a ragged batch. See views.h for the data, team.h for the threads.
#include "step.h"

#include "../kernels/thread_pool.h"
#include "attention_plan.h"
#include "gemm_run.h"
#include "head.h"
#include "heads.h"
#include "layouts.h"
#include "rows.h"
#include "workspace.h"

namespace fastengine {
namespace FE_ISA {
namespace {

Activations shifted(const Activations& a, int64_t bytes) {
  const auto shift = [&](auto* p) { return reinterpret_cast<decltype(p)>(reinterpret_cast<uint8_t*>(p) + bytes); };
  return {a.num_rows, a.padded_k, a.group_blocks, a.quantized, shift(a.values), shift(a.scales), shift(a.sums), shift(a.starts), shift(a.rows), nullptr, nullptr};
}

float half_value(const uint8_t* p) {
  uint16_t bits;
  __builtin_memcpy(&bits, p, sizeof(bits));
  return _cvtsh_ss(bits);
}

constexpr float kLog2E = 1.44269504f;

// gate / (1 + e^-gate) to about float's precision. The power is 2 to a whole number times 2 to the rest, whose
// polynomial is off by 8e-8; it stops at 2^126, which the reciprocal's estimate, refined once, still has.
FE_INLINE Vec silu(Vec gate) {
#if defined(__AVX512F__)
  const Vec exponent = _mm512_min_ps(vset(126.0f), vmul(gate, vset(-kLog2E)));
  const Vec rest = _mm512_reduce_ps(exponent, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  Vec power = vfma(vset(1.877576262e-3f), rest, vset(8.989341091e-3f));
  power = vfma(power, rest, vset(5.582631721e-2f));
  power = vfma(power, rest, vset(0.2401536173f));
  power = vfma(power, rest, vset(0.6931530732f));
  power = vfma(power, rest, vset(0.9999999251f));
  const Vec divisor = vadd(vset(1.0f), _mm512_scalef_ps(power, exponent));
  const Vec estimate = _mm512_rcp14_ps(divisor);
  return vmul(gate, vmul(estimate, _mm512_fnmadd_ps(divisor, estimate, vset(2.0f))));
#else
  return vdiv(gate, vadd(vset(1.0f), vexp(vsub(vzero(), gate))));
#endif
}

struct Step {
  const ModelView& m;
  const StepArgs& s;
  const Workspace& w;

  uint8_t* scratch(const Member& me) const { return w.scratch + me.index * w.scratch_bytes; }

  void embed(Member& me) const {
    for_tasks(me, s.num_tokens, 4, [&](int64_t first, int64_t last) {
      for (int64_t t = first; t < last; ++t) embedding_row(m.embedding, s.token_ids[t], w.all.x + t * m.shape.hidden);
    });
  }

  // The input or context of `rows` as this thread has them, for one linear.
  Activations own(const Member& me, const RowSet& rows, const Activations& a, const LinearView& linear) const {
    return for_linear(shifted(a, me.index * rows.copy_bytes), linear);
  }

  void quantize_piece(const float* rows, int64_t stride, int64_t k, const float* weight, const Activations& out, int64_t tile, int64_t first_group, int64_t last_group) const {
    TileSource source{rows + tile * kTileRows * stride, stride, 0, k, weight, {}};
    for (int64_t r = 0; weight != nullptr && r < rows_of_tile(out.num_rows, tile); ++r) {
      source.factors[r] = norm_factor(source.x + r * stride, k, m.shape.rms_epsilon);
    }
    quantize_tile(source, tile, first_group, last_group, out);
  }

  // Rows of `k` values for a linear; with `weight`, after their norm. `own_copy`: `out` is this thread's alone.
  void quantize(Member& me, const float* rows, int64_t stride, int64_t k, const float* weight, const Activations& out, bool own_copy) const {
    if (own_copy) return quantize_piece(rows, stride, k, weight, out, 0, 0, out.num_groups());
    quantize_tiles(me, rows, stride, k, weight, out, nullptr, ceil_div(out.num_rows, kTileRows));
  }

  // With null: the first `num_tiles`.
  void quantize_tiles(Member& me, const float* rows, int64_t stride, int64_t k, const float* weight, const Activations& out, const int32_t* tiles, int64_t num_tiles) const {
    const int64_t num_groups = out.num_groups();
    // Few tiles are shared out in pieces; what each then has to find out again, the norm's factors, is little.
    const int64_t pieces = num_tiles >= 2 * me.team->num_threads ? 1 : min_i(me.team->num_threads, num_groups);
    for_tasks(me, num_tiles * pieces, 1, [&](int64_t first, int64_t last) {
      for (int64_t task = first; task < last; ++task) {
        const int64_t at = task / pieces, piece = task % pieces, tile = tiles != nullptr ? tiles[at] : at;
        quantize_piece(rows, stride, k, weight, out, tile, num_groups * piece / pieces, num_groups * (piece + 1) / pieces);
      }
    });
  }

  FinishedQueries queries(const RowSet& rows) const { return {rows.num_rows, w.queries.values, w.queries.scales, w.queries.starts}; }

  template <int kPanels>
  void project_heads(Member& me, int64_t l, const LinearView& part, int64_t first_head, const RowSet& rows, const int32_t* tokens) const {
    const HeadTarget target{cache(l), new_rows(m.layers[l]), queries(rows), m.shape.num_heads, score_scale()};
    const auto expect = [&](int64_t first, int64_t n, int64_t panel) { expect_head(target, first_head + panel / kPanels, tokens, first, n); };
    run_gemm<kPanels, true>(me, part, own(me, rows, rows.input, part), scratch(me), expect, [&](int64_t first, int64_t n, int64_t panel, const float (*values)[kChunkRows * kPanel]) {
      finish_head(target, first_head + panel / kPanels, tokens, first, n, values);
    });
  }

  // Panels [first_panel, end_panel) of `rows`, which are those of `tokens`, or with null all.
  void project_qkv(Member& me, int64_t l, int64_t first_panel, int64_t end_panel, const RowSet& rows, const int32_t* tokens) const {
    const LinearView& whole = m.layers[l].qkv;
    LinearView part = whole;
    part.num_panels = end_panel - first_panel;
    part.weights += first_panel * whole.panel_bytes;
    if (whole.bias != nullptr) part.bias += first_panel * kPanel;
    if (w.finishes_heads && m.shape.head_dim == 2 * kPanel) return project_heads<2>(me, l, part, first_panel / 2, rows, tokens);
    if (w.finishes_heads) return project_heads<4>(me, l, part, first_panel / 4, rows, tokens);
    const auto target = [&](int64_t row, int64_t panel) { return w.qkv + (tokens != nullptr ? tokens[row] : row) * w.qkv_stride + (first_panel + panel) * kPanel; };
    const auto expect = [&](int64_t first, int64_t n, int64_t panel) {
      for (int64_t r = 0; r < n; ++r) expect_write(target(first + r, panel));
    };
    run_gemm<1>(me, part, own(me, rows, rows.input, part), scratch(me), expect, [&](int64_t first, int64_t n, int64_t panel, const float (*values)[kChunkRows * kPanel]) {
      for (int64_t r = 0; r < n; ++r) {
        float* const out = target(first + r, panel);
        for (int64_t v = 0; v < kPanel; v += kLanes) vstore(out + v, vload(values[0] + r * kPanel + v));
      }
    });
  }

  void norm_and_quantize(Member& me, const RowSet& rows, const float* weight, const LinearView& linear) const {
    quantize(me, rows.x, m.shape.hidden, m.shape.hidden, weight, own(me, rows, rows.input, linear), rows.copy_bytes != 0);
  }

  void project_qkv_of_all(Member& me, int64_t l) const {
    const LayerView& layer = m.layers[l];
    norm_and_quantize(me, w.all, layer.input_norm, layer.qkv);
    project_qkv(me, l, 0, layer.qkv.num_panels, w.all, nullptr);
  }

  // Keys and values of all rows, queries of those alone that go on from here.
  void project_qkv_of_last(Member& me, int64_t l) const {
    const LayerView& layer = m.layers[l];
    const int64_t h = m.shape.hidden, first_panel = m.shape.num_heads * m.shape.head_dim / kPanel;
    norm_and_quantize(me, w.all, layer.input_norm, layer.qkv);
    project_qkv(me, l, first_panel, layer.qkv.num_panels, w.all, nullptr);
    if (w.last.num_rows == 0) return;
    for_tasks(me, w.last.num_rows, 1, [&](int64_t first, int64_t last) {
      for (int64_t r = first; r < last; ++r) __builtin_memcpy(w.last.x + r * h, w.all.x + s.sample_rows[r] * h, static_cast<size_t>(h) * sizeof(float));
    });
    norm_and_quantize(me, w.last, layer.input_norm, layer.qkv);
    project_qkv(me, l, 0, first_panel, w.last, s.sample_rows);
  }

  KvLayer cache(int64_t l) const {
    KvLayer c;
    c.type = static_cast<KvType>(s.kv_type);
    c.key = s.key_caches[l];
    c.value = s.value_caches[l];
    c.key_scale = s.key_scales != nullptr ? s.key_scales[l] : nullptr;
    c.value_scale = s.value_scales != nullptr ? s.value_scales[l] : nullptr;
    c.block_size = s.block_size;
    c.num_kv_heads = m.shape.num_kv_heads;
    c.head_dim = m.shape.head_dim;
    return c;
  }

  NewRows new_rows(const LayerView& layer) const {
    const ModelShape& p = m.shape;
    return {m.cos_sin, p.rotary_dim, p.rope_interleaved != 0, layer.query_norm, layer.key_norm, p.rms_epsilon, s.positions, s.slot_mapping};
  }

  float score_scale() const { return m.shape.attention_scale * kLog2E; }

  void rotate_and_store(Member& me, const LayerView& layer, const KvLayer& c, const AttentionPlan& plan) const {
    const ModelShape& p = m.shape;
    // Neighbours in a sequence share cache lines of the keys and values.
    const int64_t grain = max_i(1, min_i(16, plan.num_stored / (4 * me.team->num_threads)));
    for_tasks(me, plan.num_stored, grain, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) {
        const int64_t t = plan.stored[i];
        float* const row = w.qkv + t * w.qkv_stride;
        const Rotation rotation(m.cos_sin + s.positions[t] * p.rotary_dim, p.rotary_dim, p.rope_interleaved != 0, reinterpret_cast<float*>(scratch(me)));
        for (int64_t h = p.num_heads; h < p.num_heads + p.num_kv_heads; ++h) {
          float* const head = row + h * p.head_dim;
          if (layer.key_norm != nullptr) norm_row(head, layer.key_norm, p.head_dim, p.rms_epsilon, head);
          rotation.apply(head, head);
        }
        if (s.slot_mapping[t] < 0) continue;
        const float *const keys = row + p.num_heads * p.head_dim, *const values = keys + p.num_kv_heads * p.head_dim;
        for (int64_t h = 0; h < p.num_kv_heads; ++h) write_kv(c, s.slot_mapping[t], h, keys + h * p.head_dim, values + h * p.head_dim);
      }
    });
  }

  // What attention did not quantize of its outputs.
  void quantize_loose(Member& me, const RowSet& rows, const Activations& context) const {
    const int64_t width = m.shape.num_heads * m.shape.head_dim;
    const AttentionPlan& plan = rows.plan;
    if (rows.copy_bytes != 0) return quantize(me, rows.attended, width, width, nullptr, context, true);
    if (plan.num_loose > 0) quantize_tiles(me, rows.attended, width, width, nullptr, context, plan.loose, plan.num_loose);
  }

  void attend(Member& me, int64_t l, const RowSet& rows) const {
    const AttentionPlan& plan = rows.plan;
    const AttentionInput in{cache(l), w.qkv, queries(rows), w.qkv_stride, rows.attended, own(me, rows, rows.context, m.layers[l].output), m.shape.num_heads, s.block_tables, s.max_blocks, score_scale(),
                            plan.splits, rows.arrived + l * plan.num_splits, rows.partials, new_rows(m.layers[l])};
    for_tasks(me, plan.num_tasks, 1, [&](int64_t i, int64_t) { attention(in, plan.tasks + i, plan.tasks + plan.num_tasks, scratch(me)); });
  }

  // x += the product.
  void project_and_add(Member& me, const LinearView& linear, const Activations& a, float* x) const {
    const int64_t h = m.shape.hidden;
    const auto expect = [&](int64_t first, int64_t n, int64_t panel) {
      for (int64_t r = 0; r < n; ++r) expect_write(x + (first + r) * h + panel * kPanel);
    };
    run_gemm<1>(me, linear, a, scratch(me), expect, [&](int64_t first, int64_t n, int64_t panel, const float (*values)[kChunkRows * kPanel]) {
      for (int64_t r = 0; r < n; ++r) {
        for (int64_t v = 0; v < kPanel && panel * kPanel + v < h; v += kLanes) {
          float* const target = x + (first + r) * h + panel * kPanel + v;
          const int64_t lanes = min_i(kLanes, h - panel * kPanel - v);
          vstore_n(target, vadd(vload_n(target, lanes), vload(values[0] + r * kPanel + v)), lanes);
        }
      }
    });
  }

  // kPanels panels hold the gates and ups of one group of the next linear's activations.
  template <int kPanels>
  void gate_in(Member& me, const LayerView& layer, const RowSet& rows) const {
    constexpr int64_t kFeatures = kPanels * 16;
    const Activations product = for_linear(rows.product, layer.down);
    const bool at_once = product.quantized && layer.gate_up.num_panels * 16 == product.padded_k;
    const auto expect = [&](int64_t first, int64_t n, int64_t panel) {
      const auto* const values = reinterpret_cast<const float*>(product.values);
      const int64_t num_bytes = min_i(kFeatures, product.padded_k - panel * 16);  // of a row
      for (int64_t r = 0; at_once && r < n; r += kTileRows) {
        // A group of a full tile is contiguous.
        const float* const group = values + ((first + r) * product.padded_k + panel * 16 * min_i(kTileRows, n - r)) / 4;
        for (int64_t line = 0; line < num_bytes / 8; ++line) expect_write(group + line * kPanel);
      }
    };
    run_gemm<kPanels>(me, layer.gate_up, own(me, rows, rows.input, layer.gate_up), scratch(me), expect,
                      [&](int64_t first, int64_t n, int64_t panel, const float (*values)[kChunkRows * kPanel]) {
      const int64_t num_panels = min_i(kPanels, layer.gate_up.num_panels - panel);
      for (int64_t begin = 0; begin < n; begin += kTileRows) {
        alignas(64) float gated[kTileRows * kFeatures];
        float* const target = at_once ? gated : rows.gated + (first + begin) * w.gated_stride + panel * 16;
        const int64_t stride = at_once ? kFeatures : w.gated_stride;
        for (int64_t r = 0; r < min_i(kTileRows, n - begin); ++r) {
          for (int64_t p = 0; p < num_panels; ++p) {
            const float* const pair = values[p] + (begin + r) * kPanel;
            for (int64_t v = 0; v < 16; v += kLanes) vstore(target + r * stride + p * 16 + v, vmul(silu(vload(pair + v)), vload(pair + 16 + v)));
          }
        }
        const int64_t group = panel / kPanels;
        if (at_once) quantize_tile({gated, stride, panel * 16, product.padded_k, nullptr, {}}, (first + begin) / kTileRows, group, group + 1, product);
      }
    });
    if (!at_once) quantize(me, rows.gated, w.gated_stride, m.shape.intermediate, nullptr, product, false);
  }

  void gate(Member& me, const LayerView& layer, const RowSet& rows) const {
    for_linear(rows.product, layer.down).group_blocks == 2 ? gate_in<4>(me, layer, rows) : gate_in<2>(me, layer, rows);
  }

  void last_norm(Member& me) const {
    const int64_t h = m.shape.hidden;
    const Activations last = for_linear(w.head, m.head);
    for_tasks(me, s.num_samples, 1, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        float* const row = w.samples + r * h;
        if (s.hidden_in != nullptr) {
          __builtin_memcpy(row, s.hidden_in + r * h, static_cast<size_t>(h) * sizeof(float));
        } else {
          norm_row(w.last.x + (w.last_is_apart ? r : s.sample_rows[r]) * h, m.final_norm, h, m.shape.rms_epsilon, row);
        }
        if (s.hidden_out != nullptr) __builtin_memcpy(s.hidden_out + r * h, row, static_cast<size_t>(h) * sizeof(float));
      }
    });
    quantize(me, w.samples, h, h, nullptr, last, false);
  }

  void run(Member& me) const {
    if (s.num_tokens > 0) run_layers(me);
    if (s.num_samples == 0) return;
    last_norm(me);
    if (s.logits != nullptr || s.token_out != nullptr) compute_head(me, m, s, w, scratch(me));
  }

  void run_layers(Member& me) const {
    embed(me);
    for (int64_t l = 0; l < m.shape.num_layers; ++l) {
      const LayerView& layer = m.layers[l];
      const bool is_last = w.last_is_apart && l + 1 == m.shape.num_layers;
      const RowSet& rows = is_last ? w.last : w.all;
      is_last ? project_qkv_of_last(me, l) : project_qkv_of_all(me, l);
      if (rows.plan.num_stored > 0 && !w.finishes_heads) rotate_and_store(me, layer, cache(l), rows.plan);
      if (rows.num_rows == 0) return;
      attend(me, l, rows);
      const Activations context = own(me, rows, rows.context, layer.output);
      quantize_loose(me, rows, context);
      project_and_add(me, layer.output, context, rows.x);
      norm_and_quantize(me, rows, layer.post_attention_norm, layer.gate_up);
      gate(me, layer, rows);
      project_and_add(me, layer.down, for_linear(rows.product, layer.down), rows.x);
    }
  }
};

struct Job {
  const Step* step;
  Team* team;
};

void run_member(void* context, int64_t index) {
  const Job& job = *static_cast<Job*>(context);
  Member me{job.team, static_cast<int>(index), 0};
  job.step->run(me);
}

}  // namespace

void embedding_row(const LinearView& table, int64_t token, float* out) {
  const uint8_t* const panel = table.weights + token / kPanel * table.panel_bytes;
  const int64_t column = token % kPanel;
  if (table.layout == Layout::kFloat32) {
    for (int64_t i = 0; i < table.k; ++i) out[i] = reinterpret_cast<const float*>(panel)[i * kPanel + column];
    return;
  }
  for (int64_t i = 0; i < table.k; i += 4) {
    const uint8_t* const block = panel + i / kBlockK * kInt8BlockBytes;
    const uint8_t* const values = block + kInt8ValuesAt + (i % kBlockK / 4 * kPanel + column) * 4;
    const float scale = half_value(block + kScalesAt + column * 2);
    for (int64_t j = 0; j < min_i(4, table.k - i); ++j) out[i + j] = scale * static_cast<float>(values[j] - 128);
  }
}

int64_t step_bytes(const ModelView& model, const StepArgs& args, int num_threads) { return cut(model, args, num_threads, nullptr).num_bytes; }

void run_step(const ModelView& model, const StepArgs& args, void* memory, int num_threads) {
  Workspace workspace = cut(model, args, num_threads, static_cast<uint8_t*>(memory));
  const auto plan = [&](RowSet* rows, bool samples_only) {
    plan_attention(model.shape, args, num_threads, samples_only, &rows->plan);
    for (int64_t i = 0; i < rows->plan.num_splits * model.shape.num_layers; ++i) rows->arrived[i] = 0;
  };
  plan(&workspace.all, false);
  if (workspace.last_is_apart) plan(&workspace.last, true);
  // Of every thread, whether or not it comes in time to do anything.
  for (int64_t i = 0; i < num_threads * args.num_samples; ++i) workspace.best_values[i] = -3.4e38f, workspace.best_ids[i] = 0x7fffffff;
  const Step step{model, args, workspace};
  Job job{&step, workspace.team};
  run_tasks(num_threads, run_member, &job);
  if (args.token_out == nullptr) return;
  for (int64_t r = 0; r < args.num_samples; ++r) {
    float value = -3.4e38f;
    int32_t id = 0x7fffffff;
    for (int t = 0; t < num_threads; ++t) {
      const float v = workspace.best_values[t * args.num_samples + r];
      const int32_t candidate = workspace.best_ids[t * args.num_samples + r];
      if (v > value || (v == value && candidate < id)) value = v, id = candidate;
    }
    args.token_out[r] = id == 0x7fffffff ? -1 : id;
  }
}

}  // namespace FE_ISA
}  // namespace fastengine
