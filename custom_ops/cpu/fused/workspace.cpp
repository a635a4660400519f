#include "workspace.h"

#include "dot.h"

namespace fastengine {
namespace FE_ISA {
namespace {

constexpr int64_t kPhasesPerLayer = 12;
#if defined(FE_HAS_DOTS)
constexpr int64_t kRowsScreened = rows_screened(true);
#else
constexpr int64_t kRowsScreened = rows_screened(false);
#endif

// Hands out aligned pieces; with base 0 it only measures.
class Cutter {
 public:
  explicit Cutter(uint8_t* base) : base_(base) {}
  template <typename T>
  __attribute__((always_inline)) T* take(int64_t count) {
    T* const out = reinterpret_cast<T*>(base_ + used_);
    used_ += ceil_div(count * static_cast<int64_t>(sizeof(T)), 64) * 64 + 64;
    return out;
  }
  __attribute__((always_inline)) int64_t used() const { return used_; }

 private:
  uint8_t* base_;
  int64_t used_ = 0;
};

// Memory for the activations of one or two linears of equal input, which may differ in layout.
Activations cut_activations(Cutter* cutter, const LinearView& w, const LinearView& other, int64_t num_rows) {
  Activations a;
  a.num_rows = num_rows;
  a.padded_k = w.padded_k;
  a.group_blocks = 1;
  const bool any_quantized = w.layout != Layout::kFloat32 || other.layout != Layout::kFloat32;
  const bool any_float = w.layout == Layout::kFloat32 || other.layout == Layout::kFloat32;
  const int64_t quantized_rows = any_quantized ? num_rows : 0, num_blocks = w.padded_k / kBlockK;
  a.values = cutter->take<int8_t>(quantized_rows * w.padded_k);
  a.scales = cutter->take<float>(quantized_rows * num_blocks);
  a.sums = cutter->take<float>(quantized_rows * num_blocks);
  a.starts = cutter->take<int32_t>(quantized_rows * num_blocks);
  a.rows = cutter->take<float>(any_float ? num_rows * w.padded_k : 0);
  a.quantized = false;
  a.sum_pairs = nullptr;
  a.sum_units = nullptr;
  return a;
}

RowSet cut_rows(Cutter* cutter, const ModelView& m, const StepArgs& s, int num_threads, int64_t gated_stride, bool samples_only) {
  const LayerView& layer = m.layers[0];
  RowSet rows;
  const int64_t n = rows.num_rows = samples_only ? s.num_samples : s.num_tokens;
  rows.x = cutter->take<float>(n * m.shape.hidden);
  rows.attended = cutter->take<float>(n * m.shape.num_heads * m.shape.head_dim);
  rows.gated = cutter->take<float>(n * gated_stride);
  const int64_t before = cutter->used();
  rows.input = cut_activations(cutter, layer.qkv, layer.gate_up, n);
  rows.context = cut_activations(cutter, layer.output, layer.output, n);
  rows.copy_bytes = n <= kRowsCopied ? cutter->used() - before : 0;
  cutter->take<uint8_t>(rows.copy_bytes * (num_threads - 1));
  rows.product = cut_activations(cutter, layer.down, layer.down, n);
  rows.plan = {};
  plan_attention(m.shape, s, num_threads, samples_only, &rows.plan);
  rows.plan.tasks = cutter->take<AttentionTask>(rows.plan.num_tasks);
  rows.plan.splits = cutter->take<AttentionSplit>(rows.plan.num_splits);
  rows.plan.stored = cutter->take<int32_t>(rows.plan.num_stored);
  rows.plan.loose = cutter->take<int32_t>(rows.plan.num_tiles);
  rows.arrived = cutter->take<uint32_t>(rows.plan.num_splits * m.shape.num_layers);
  rows.partials = cutter->take<float>(rows.plan.num_partials);
  return rows;
}

Screening cut_screening(Cutter* cutter, const ModelView& m, const StepArgs& s, const Activations& head) {
  Screening screening{};
  screening.used = m.screen.weights != nullptr && s.logits == nullptr && s.token_out != nullptr && s.num_samples <= kRowsScreened;
  if (!screening.used) return screening;
  const int64_t blocks = s.num_samples * (head.padded_k / kBlockK), strips = s.num_samples * m.screen.num_panels * (kPanel / kStrip);
  screening.shifts = cutter->take<float>(blocks);
  screening.energies = cutter->take<float>(blocks);
  screening.scales = cutter->take<float>(s.num_samples);
  screening.rounded = cutter->take<float>(s.num_samples);
  screening.outliers = cutter->take<int64_t>(s.num_samples);
  screening.likely = cutter->take<float>(strips);
  screening.highest = cutter->take<float>(strips);
  return screening;
}

// Of one thread, for a phase: attention's, or the sums of the widest linear's input.
int64_t scratch_bytes(const ModelView& m, const StepArgs& s) {
  const LayerView& layer = m.layers[0];
  int64_t bytes = attention_scratch_bytes(m.shape.head_dim, m.shape.rotary_dim) + 4 * m.shape.hidden + 64;
  const int64_t widest = max_i(max_i(layer.qkv.padded_k, layer.output.padded_k), layer.down.padded_k);
  bytes = max_i(bytes, max_i(sum_pairs_bytes(s.num_tokens, widest), sum_pairs_bytes(s.num_samples, m.head.padded_k)));
  return ceil_div(bytes, 64) * 64 + 64;
}

}  // namespace

Workspace cut(const ModelView& m, const StepArgs& s, int num_threads, uint8_t* base) {
  Cutter cutter(base);
  const LayerView& layer = m.layers[0];
  const int64_t r = max_i(1, s.num_samples);
  Workspace w;
  w.team = cutter.take<Team>(1);
  const int64_t num_phases = m.shape.num_layers * kPhasesPerLayer + 8;
  Phase* const phases = cutter.take<Phase>(num_phases);
  Part* const parts = cutter.take<Part>(num_phases * num_threads);
  if (base != nullptr) {
    *w.team = {num_threads, phases, parts};
    for (int64_t i = 0; i < num_phases; ++i) phases[i].done = 0, phases[i].sleeping = 0;
    for (int64_t i = 0; i < num_phases * num_threads; ++i) parts[i].taken = 0;
  }
  w.qkv_stride = layer.qkv.num_panels * kPanel;
  w.gated_stride = layer.gate_up.num_panels * kPanel / 2;
  w.all = cut_rows(&cutter, m, s, num_threads, w.gated_stride, false);
  // Decodes alone, whose attention has few rows to rotate, are quicker with twice as many tasks of half a head.
  w.finishes_heads = static_cast<KvType>(s.kv_type) == KvType::kInt8 && (m.shape.head_dim == 2 * kPanel || m.shape.head_dim == 4 * kPanel) && w.all.plan.num_stored > 0;
  const int64_t num_finished = w.finishes_heads ? s.num_tokens * m.shape.num_heads : 0;
  w.queries = {0, cutter.take<int8_t>(num_finished * m.shape.head_dim), cutter.take<float>(num_finished), cutter.take<int32_t>(num_finished)};
  if (!w.finishes_heads) w.queries.values = nullptr;
  w.qkv = cutter.take<float>(w.finishes_heads ? 0 : s.num_tokens * w.qkv_stride);
  w.last_is_apart = samples_end_sequences(s);
  w.last = w.last_is_apart ? cut_rows(&cutter, m, s, num_threads, w.gated_stride, true) : w.all;
  w.samples = cutter.take<float>(r * m.shape.hidden);
  w.head = cut_activations(&cutter, m.head, m.head, r);
  w.screening = cut_screening(&cutter, m, s, w.head);
  w.scratch_bytes = scratch_bytes(m, s);
  w.scratch = cutter.take<uint8_t>(num_threads * w.scratch_bytes);
  w.best_values = cutter.take<float>(num_threads * r);
  w.best_ids = cutter.take<int32_t>(num_threads * r);
  w.num_bytes = cutter.used();
  return w;
}

}  // namespace FE_ISA
}  // namespace fastengine
