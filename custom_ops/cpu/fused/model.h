// A dense decoder with packed weights, as its handle owns it.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "views.h"

namespace fastengine {
namespace fused {

enum class SourceKind : int32_t { kFloat32 = 0, kFloat16 = 1, kQ4_0 = 2, kQ4_1 = 3, kQ8_0 = 4 };

// 64-byte aligned memory, on huge pages where the system gives them.
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(int64_t num_bytes);
  ~Buffer();
  Buffer(Buffer&& other) noexcept { swap(other); }
  Buffer& operator=(Buffer&& other) noexcept {
    swap(other);
    return *this;
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  uint8_t* data() const { return data_; }
  int64_t size() const { return size_; }

 private:
  void swap(Buffer& other) {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
  }
  uint8_t* data_ = nullptr;
  int64_t size_ = 0;
};

struct Linear {
  LinearView shape{};  // its pointers are unset: see view()
  Buffer weights;
  std::vector<float> scales, bias;

  LinearView view() const {
    LinearView out = shape;
    out.weights = weights.data();
    out.scales = scales.data();
    out.bias = bias.empty() ? nullptr : bias.data();
    return out;
  }
};

struct DecoderLayer {
  std::vector<float> input_norm, post_attention_norm, query_norm, key_norm;
  Linear qkv, output, gate_up, down;
};

struct Model {
  ModelShape shape{};
  std::vector<float> cos_sin, final_norm;
  std::vector<DecoderLayer> layers;
  Linear embedding, lm_head;
  std::vector<LayerView> layer_views;

  // Valid until a weight changes.
  ModelView view();
};

}  // namespace fused
}  // namespace fastengine
