// A dense decoder with packed weights, as its handle owns it.
//
// All weights lie in one piece of memory, the arena, which belongs to the caller: it can be dropped,
// saved and filled again as a whole. The model keeps where things are in it.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "views.h"

namespace fastengine {
namespace fused {

enum class SourceKind : int32_t { kFloat32 = 0, kFloat16 = 1, kQ4_0 = 2, kQ4_1 = 3, kQ8_0 = 4, kBfloat16 = 5 };

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

constexpr int64_t kAbsent = -1;

struct Linear {
  LinearView shape{};  // its pointers are unset: see view()
  int64_t rows = 0;    // as the model has them; shape.n counts padding between pairs
  bool paired = false;
  int64_t weights_at = kAbsent, bias_at = kAbsent;  // in the arena

  int64_t num_bytes() const { return shape.num_panels * shape.panel_bytes; }  // of weights
  LinearView view(const uint8_t* arena) const {
    LinearView out = shape;
    out.weights = arena + weights_at;
    out.bias = bias_at == kAbsent ? nullptr : reinterpret_cast<const float*>(arena + bias_at);
    return out;
  }
};

struct Vector {
  int64_t size = 0, at = kAbsent;
  const float* view(const uint8_t* arena) const { return at == kAbsent ? nullptr : reinterpret_cast<const float*>(arena + at); }
};

struct DecoderLayer {
  Vector input_norm, post_attention_norm, query_norm, key_norm;
  Linear qkv, output, gate_up, down;
};

struct Model {
  ModelShape shape{};
  std::vector<float> cos_sin;
  std::vector<DecoderLayer> layers;
  Linear embedding, lm_head;
  Linear screen;  // of the head, if defined: see derive_screen()
  Vector final_norm;
  int64_t num_bytes = 0;
  uint8_t* arena = nullptr;
  std::vector<LayerView> layer_views;

  // Both throw std::invalid_argument for a layer or name that does not exist; layer -1 is the model's own.
  Linear& linear(int64_t layer, const std::string& name);
  Vector& vector(int64_t layer, const std::string& name);
  // What a step with that many greedy rows reads of the arena, but for rows of the embedding and strips of the head that may win; up to
  // `rows_screened` rows read the screen.
  int64_t bytes_read(int64_t num_greedy, int64_t rows_screened) const;
  const Linear& head() const { return shape.tied != 0 ? embedding : lm_head; }

  // Takes the next `size` bytes of the arena.
  int64_t reserve(int64_t size);
  void bind(uint8_t* memory);
  // Valid until the next bind().
  ModelView view() const;
};

}  // namespace fused
}  // namespace fastengine
