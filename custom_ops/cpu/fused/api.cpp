// The fused decoder's C interface: handles, packing, steps. Errors come back as a message.
#include <cpuid.h>

#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>

#include "../kernels/thread_pool.h"
#include "model.h"
#include "pack.h"

#define FE_ISA avx512
#include "step.h"
#undef FE_ISA

namespace fastengine {
namespace avx2 {
int64_t step_bytes(const fused::ModelView& model, const fused::StepArgs& args, int num_threads);
void run_step(const fused::ModelView& model, const fused::StepArgs& args, void* memory, int num_threads);
}  // namespace avx2

namespace fused {

ModelView Model::view() {
  layer_views.clear();
  const auto pointer = [](const std::vector<float>& v) { return v.empty() ? nullptr : v.data(); };
  for (const DecoderLayer& l : layers) {
    layer_views.push_back({pointer(l.input_norm), pointer(l.post_attention_norm), pointer(l.query_norm), pointer(l.key_norm), l.qkv.view(), l.output.view(),
                           l.gate_up.view(), l.down.view()});
  }
  return {shape, cos_sin.data(), layer_views.data(), embedding.view(), shape.tied != 0 ? embedding.view() : lm_head.view(), final_norm.data()};
}

namespace {

struct Handle {
  Model model;
  Buffer memory;
  std::mutex running;
  bool use_avx512;
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

bool has_avx512_vnni() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vnni");
}

Handle& at(int64_t id) { return *reinterpret_cast<Handle*>(id); }

DecoderLayer& layer_of(Handle& handle, int64_t layer) {
  if (layer < 0 || layer >= static_cast<int64_t>(handle.model.layers.size())) throw std::invalid_argument("there is no layer " + std::to_string(layer));
  return handle.model.layers[static_cast<size_t>(layer)];
}

Linear& linear_of(Handle& handle, int64_t layer, const std::string& name) {
  if (name == "embedding") return handle.model.embedding;
  if (name == "lm_head") return handle.model.lm_head;
  DecoderLayer& l = layer_of(handle, layer);
  if (name == "qkv") return l.qkv;
  if (name == "output") return l.output;
  if (name == "gate_up") return l.gate_up;
  if (name == "down") return l.down;
  throw std::invalid_argument("there is no linear " + name);
}

std::vector<float>& vector_of(Handle& handle, int64_t layer, const std::string& name) {
  if (name == "cos_sin") return handle.model.cos_sin;
  if (name == "final_norm") return handle.model.final_norm;
  DecoderLayer& l = layer_of(handle, layer);
  if (name == "input_norm") return l.input_norm;
  if (name == "post_attention_norm") return l.post_attention_norm;
  if (name == "query_norm") return l.query_norm;
  if (name == "key_norm") return l.key_norm;
  throw std::invalid_argument("there is no vector " + name);
}

}  // namespace
}  // namespace fused
}  // namespace fastengine

using namespace fastengine;         // NOLINT
using namespace fastengine::fused;  // NOLINT

#pragma GCC visibility push(default)
extern "C" {

struct FusedPart {
  const void* data;
  const int32_t* order;
  int64_t kind, rows;
};

const char* fe_fused_error() { return last_error.c_str(); }

// 0 on success, and *id; `isa` 0: the best there is, 2: AVX2.
int fe_fused_create(const ModelShape* shape, int64_t isa, int64_t* id) {
  return guarded([&] {
    auto handle = std::make_unique<Handle>();
    handle->model.shape = *shape;
    handle->model.layers.resize(static_cast<size_t>(shape->num_layers));
    handle->use_avx512 = isa == 0 && has_avx512_vnni();
    *id = reinterpret_cast<int64_t>(handle.release());
  });
}

void fe_fused_destroy(int64_t id) { delete &at(id); }

int64_t fe_fused_uses_avx512(int64_t id) { return at(id).use_avx512; }

int fe_fused_set_vector(int64_t id, int64_t layer, const char* name, const float* data, int64_t size) {
  return guarded([&] { vector_of(at(id), layer, name).assign(data, data + size); });
}

int fe_fused_set_linear(int64_t id, int64_t layer, const char* name, const FusedPart* parts, int64_t num_parts, int64_t k, int64_t layout, int64_t group, int64_t paired,
                        const float* bias) {
  return guarded([&] {
    std::vector<WeightPart> list;
    for (int64_t i = 0; i < num_parts; ++i) list.push_back({static_cast<const uint8_t*>(parts[i].data), static_cast<SourceKind>(parts[i].kind), parts[i].rows, parts[i].order});
    linear_of(at(id), layer, name) = pack_linear(list, k, static_cast<Layout>(layout), group, paired != 0, bias);
  });
}

int fe_fused_unpack_row(int64_t id, int64_t layer, const char* name, int64_t row, float* out) {
  return guarded([&] { unpack_row(linear_of(at(id), layer, name), row, out); });
}

int fe_fused_step(int64_t id, const StepArgs* args, int64_t num_threads) {
  return guarded([&] {
    Handle& handle = at(id);
    const std::lock_guard<std::mutex> lock(handle.running);
    const ModelView view = handle.model.view();
    const int threads = static_cast<int>(num_threads);
    if (fastengine::num_threads() != threads) set_num_threads(threads);
    const int64_t needed = handle.use_avx512 ? avx512::step_bytes(view, *args, threads) : avx2::step_bytes(view, *args, threads);
    if (needed > handle.memory.size()) handle.memory = Buffer(needed + needed / 4);
    if (handle.use_avx512) {
      avx512::run_step(view, *args, handle.memory.data(), threads);
    } else {
      avx2::run_step(view, *args, handle.memory.data(), threads);
    }
  });
}
}
#pragma GCC visibility pop
