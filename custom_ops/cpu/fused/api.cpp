// The fused decoder's C interface: handles, packing, steps. Errors come back as a message.
#include <chrono>
#include <cstring>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "../kernels/thread_pool.h"
#include "model.h"
#include "pack.h"
#include "slot_step.h"
#include "step_isa.h"

namespace fastengine {
namespace fused {

namespace {

struct Handle {
  Model model;
  Buffer memory;
  SlotStep slot_step;
  std::mutex running;
  const StepIsa* isa;
};

thread_local std::string last_error;

template <typename Body>
int guarded(const Body& body) {
  try {
    body();
    return 0;
  } catch (const std::exception& error) {
    last_error = error.what();
    return 1;
  }
}

// `name` "best": what is best here.
const StepIsa* isa_for(const std::string& name) {
  if (name == "best") return &best_step_isa();
  const StepIsa* const set = step_isa_named(name.c_str());
  if (set == nullptr) throw std::invalid_argument("this library has no fused step for " + name);
  if (!has_step_isa(*set)) throw std::invalid_argument("this processor can't run the fused step of " + name);
  return set;
}

// Runs body(thread) on every thread at once, and says how long that took.
template <typename Body>
double seconds_of(int64_t num_threads, const Body& body) {
  const auto started = std::chrono::steady_clock::now();
  std::vector<std::thread> threads;
  for (int64_t t = 1; t < num_threads; ++t) threads.emplace_back(body, t);
  body(0);
  for (std::thread& thread : threads) thread.join();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - started).count();
}

// Fills in what the step itself knows.
void draw_tokens(const Handle& handle, const StepArgs& step) {
  RowSamplingArgs& sampling = *step.sampling;
  SampleArgs& draw = sampling.draw;
  draw.logits = step.logits;
  draw.token_ids = step.token_out;
  draw.num_rows = step.num_samples;
  draw.vocab_size = handle.model.shape.vocab;
  sampling.adjust.logits = step.logits;
  sampling.adjust.num_rows = sampling.logprobs.num_rows = draw.num_rows;
  sampling.adjust.vocab_size = sampling.logprobs.vocab_size = draw.vocab_size;
  sampling.logprobs.token_ids = step.token_out;
  handle.isa->sample_rows(sampling);
}

// The caller holds `running`.
void compute(Handle& handle, const StepArgs& wanted, int threads) {
  StepArgs step = wanted;
  if (step.sampling != nullptr) step.token_out = nullptr;  // it needs no argmax
  if (handle.model.arena == nullptr) throw std::invalid_argument("the model's memory is not bound");
  const ModelView view = handle.model.view();
  if (fastengine::num_threads() != threads) set_num_threads(threads);
  const int64_t needed = handle.isa->step_bytes(view, step, threads);
  if (needed > handle.memory.size()) {
    handle.memory = Buffer();  // the old one first
    handle.memory = Buffer(needed + needed / 4);
  }
  handle.isa->run_step(view, step, handle.memory.data(), threads);
  if (wanted.sampling != nullptr) draw_tokens(handle, wanted);
}

Handle& at(int64_t id) { return *reinterpret_cast<Handle*>(id); }

}  // namespace
}  // namespace fused
}  // namespace fastengine

using namespace fastengine;         // NOLINT
using namespace fastengine::fused;  // NOLINT

#pragma GCC visibility push(default)
extern "C" {

const char* fe_fused_error() { return last_error.c_str(); }

// Whether there is a fused step of the set of this name that this processor can run.
int fe_fused_has_isa(const char* name) {
  const StepIsa* const set = step_isa_named(name);
  return set != nullptr && has_step_isa(*set) ? 1 : 0;
}

// 0 on success, and *id; `isa`: the name of an instruction set, or "best".
int fe_fused_create(const ModelShape* shape, const char* isa, int64_t* id) {
  return guarded([&] {
    auto handle = std::make_unique<Handle>();
    handle->model.shape = *shape;
    handle->model.layers.resize(static_cast<size_t>(shape->num_layers));
    handle->isa = isa_for(isa);
    *id = reinterpret_cast<int64_t>(handle.release());
  });
}

void fe_fused_destroy(int64_t id) { delete &at(id); }

const char* fe_fused_isa(int64_t id) { return at(id).isa->name; }

// cos_sin [max_position][rotary_dim] is copied.
int fe_fused_set_rotary(int64_t id, const float* cos_sin, int64_t size) {
  return guarded([&] { at(id).model.cos_sin.assign(cos_sin, cos_sin + size); });
}

int fe_fused_define_vector(int64_t id, int64_t layer, const char* name, int64_t size) {
  return guarded([&] {
    Model& model = at(id).model;
    Vector& vector = model.vector(layer, name);
    vector.size = size;
    vector.at = model.reserve(size * static_cast<int64_t>(sizeof(float)));
  });
}

int fe_fused_define_linear(int64_t id, int64_t layer, const char* name, int64_t rows, int64_t k, int64_t layout, int64_t paired, int64_t has_bias) {
  return guarded([&] {
    Model& model = at(id).model;
    // The values of a hidden state that stand out cost most in queries and keys, and those are a sixth of the work: docs/cpu_step.md.
    // A screen reads what its LM head does.
    const bool fine = std::strcmp(name, "qkv") == 0 || std::strcmp(name, "screen") == 0;
    define_linear(&model, &model.linear(layer, name), rows, k, static_cast<Layout>(layout), paired != 0, has_bias != 0, fine);
  });
}

// Of the arena that all definitions so far need.
int64_t fe_fused_num_bytes(int64_t id) { return at(id).model.num_bytes; }

// Of those, what a step with `num_greedy` rows that take their largest logit, and no others, reads.
int64_t fe_fused_bytes_read(int64_t id, int64_t num_greedy) { return at(id).model.bytes_read(num_greedy, at(id).isa->rows_screened); }

// `arena` (64-byte aligned, zeroed or saved from another) is used until the next bind; null: none.
void fe_fused_bind(int64_t id, uint8_t* arena) { at(id).model.bind(arena); }

int fe_fused_set_vector(int64_t id, int64_t layer, const char* name, const float* values, int64_t size) {
  return guarded([&] {
    Model& model = at(id).model;
    const Vector& vector = model.vector(layer, name);
    if (size != vector.size) throw std::invalid_argument(std::string(name) + " has " + std::to_string(vector.size) + " values, not " + std::to_string(size));
    std::memcpy(model.arena + vector.at, values, static_cast<size_t>(size) * sizeof(float));
  });
}

int fe_fused_set_rows(int64_t id, int64_t layer, const char* name, int64_t first_row, const WeightPart* part, int64_t num_threads) {
  return guarded([&] {
    Model& model = at(id).model;
    const Linear& linear = model.linear(layer, name);
    pack_rows(linear, model.arena, first_row, *part, static_cast<int>(num_threads));
    if (&linear == &model.head() && model.screen.rows != 0) derive_screen(linear, model.screen, model.arena, first_row, part->rows, static_cast<int>(num_threads));
  });
}

int fe_fused_set_bias(int64_t id, int64_t layer, const char* name, int64_t first_row, const float* values, int64_t count) {
  return guarded([&] { set_bias(at(id).model.linear(layer, name), at(id).model.arena, first_row, values, count); });
}

int fe_fused_unpack_row(int64_t id, int64_t layer, const char* name, int64_t row, float* out) {
  return guarded([&] { unpack_row(at(id).model.linear(layer, name), at(id).model.arena, row, out); });
}

int fe_fused_hash_rows(const WeightPart* part, int64_t k, const uint64_t* row_keys, const uint64_t* column_keys, int64_t num_threads, uint64_t* hash) {
  return guarded([&] { *hash = hash_rows(*part, k, row_keys, column_keys, static_cast<int>(num_threads)); });
}

// Tokens and log-probabilities of logits that are there already: only those fields of `args` are read.
int fe_fused_sample(int64_t id, const StepArgs* args, int64_t num_threads) {
  return guarded([&] {
    Handle& handle = at(id);
    const std::lock_guard<std::mutex> lock(handle.running);
    if (fastengine::num_threads() != num_threads) set_num_threads(static_cast<int>(num_threads));
    draw_tokens(handle, *args);
  });
}

int fe_fused_step(int64_t id, const StepArgs* args, int64_t num_threads) {
  return guarded([&] {
    Handle& handle = at(id);
    const std::lock_guard<std::mutex> lock(handle.running);
    compute(handle, *args, static_cast<int>(num_threads));
  });
}

// A token for each of `count` slots in each of up to `num_steps` steps, into `token_out` [num_steps][count] and the slots' rows
// of `arrays`. *done steps have been made: the next one is not as plain as this takes it, or yielded no numbers, and has
// changed nothing that counts; or its number, counted from `first_step`, is not above *last_cut, which others may write meanwhile.
int fe_fused_decode(int64_t id, const SlotArrays* arrays, const int32_t* slots, int64_t count, int64_t num_steps, int64_t first_step, const int64_t* last_cut,
                    int64_t num_threads, int32_t* token_out, int64_t* done) {
  return guarded([&] {
    Handle& handle = at(id);
    const std::lock_guard<std::mutex> lock(handle.running);
    const ModelShape& shape = handle.model.shape;
    for (*done = 0; *done < num_steps; ++*done) {
      if (__atomic_load_n(last_cut, __ATOMIC_ACQUIRE) >= first_step + *done) return;
      int32_t* const tokens = token_out + *done * count;
      if (!handle.slot_step.gather(*arrays, shape, slots, count)) return;
      compute(handle, handle.slot_step.args(*arrays, tokens), static_cast<int>(num_threads));
      if (!handle.slot_step.all_finite(*arrays, shape, tokens)) return;
      append_tokens(*arrays, slots, count, tokens);
    }
  });
}

// Bytes per second at which `num_threads` threads together read `data`.
double fe_fused_read_speed(const uint8_t* data, int64_t num_bytes, int64_t num_threads) {
  const auto read = best_step_isa().read_all;
  const int64_t share = num_bytes / num_threads / 64 * 64;
  return share * num_threads / seconds_of(num_threads, [&](int64_t thread) { read(data + thread * share, share); });
}

// int8 multiplications and additions per second of `num_threads` threads.
double fe_fused_peak_speed(int64_t num_threads) {
  constexpr int64_t kRounds = 1000000;
  const auto compute = best_step_isa().dot_rounds;
  int64_t operations = 0;
  const double seconds = seconds_of(num_threads, [&](int64_t thread) {
    const int64_t done = compute(kRounds);
    if (thread == 0) operations = done;
  });
  return static_cast<double>(operations * num_threads) / seconds;
}

// Gives the step's working memory back; the next step takes it again.
void fe_fused_trim(int64_t id) {
  const std::lock_guard<std::mutex> lock(at(id).running);
  at(id).memory = Buffer();
}
}
#pragma GCC visibility pop
