#include "model.h"

#include <sys/mman.h>

#include <cstdlib>
#include <new>
#include <stdexcept>

namespace fastengine {
namespace fused {

Buffer::Buffer(int64_t num_bytes) : size_(num_bytes) {
  constexpr int64_t kHugePage = 2 << 20;
  const bool huge = num_bytes >= kHugePage;
  const int64_t alignment = huge ? kHugePage : 64;
  const int64_t wanted = (num_bytes + alignment - 1) / alignment * alignment;
  data_ = static_cast<uint8_t*>(std::aligned_alloc(static_cast<size_t>(alignment), static_cast<size_t>(wanted)));
  if (data_ == nullptr) throw std::bad_alloc();
  if (huge) madvise(data_, static_cast<size_t>(wanted), MADV_HUGEPAGE);
}

Buffer::~Buffer() { std::free(data_); }

namespace {

DecoderLayer& layer_of(Model* model, int64_t layer) {
  if (layer < 0 || layer >= static_cast<int64_t>(model->layers.size())) throw std::invalid_argument("there is no layer " + std::to_string(layer));
  return model->layers[static_cast<size_t>(layer)];
}

}  // namespace

Linear& Model::linear(int64_t layer, const std::string& name) {
  if (name == "embedding") return embedding;
  if (name == "lm_head") return lm_head;
  if (name == "screen") return screen;
  DecoderLayer& l = layer_of(this, layer);
  if (name == "qkv") return l.qkv;
  if (name == "output") return l.output;
  if (name == "gate_up") return l.gate_up;
  if (name == "down") return l.down;
  throw std::invalid_argument("there is no linear " + name);
}

Vector& Model::vector(int64_t layer, const std::string& name) {
  if (name == "final_norm") return final_norm;
  DecoderLayer& l = layer_of(this, layer);
  if (name == "input_norm") return l.input_norm;
  if (name == "post_attention_norm") return l.post_attention_norm;
  if (name == "query_norm") return l.query_norm;
  if (name == "key_norm") return l.key_norm;
  throw std::invalid_argument("there is no vector " + name);
}

int64_t Model::reserve(int64_t size) {
  const int64_t at = num_bytes;
  num_bytes += (size + 63) / 64 * 64;
  return at;
}

int64_t Model::bytes_read(int64_t num_greedy, int64_t rows_screened) const {
  int64_t unread = shape.tied != 0 ? 0 : embedding.num_bytes();
  if (screen.rows != 0) unread += num_greedy <= rows_screened ? head().num_bytes() : screen.num_bytes();
  return num_bytes - unread;
}

void Model::bind(uint8_t* memory) {
  arena = memory;
  layer_views.clear();
  for (const DecoderLayer& l : layers) {
    layer_views.push_back({l.input_norm.view(memory), l.post_attention_norm.view(memory), l.query_norm.view(memory), l.key_norm.view(memory), l.qkv.view(memory),
                           l.output.view(memory), l.gate_up.view(memory), l.down.view(memory)});
  }
}

ModelView Model::view() const {
  const LinearView no_screen{};
  return {shape, cos_sin.data(), layer_views.data(), embedding.view(arena), head().view(arena), screen.rows != 0 ? screen.view(arena) : no_screen, final_norm.view(arena)};
}

}  // namespace fused
}  // namespace fastengine
