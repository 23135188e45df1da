// Masks of a bit for each element, and what reads them: dropout, and gradients of ReLU.
//
// Each element is computed as ATen computes it with a mask of truth values: the products of dropout are with 0
// or 1, and then with the scale.
#pragma once

#include <algorithm>
#include <cstdint>

#include "vectors.h"

namespace olla_fx::masks {

constexpr int64_t bits_of_byte = 8;

// Calls a function for each element, with its number, and makes bytes of its answers.
template <typename Function>
OLLA_FX_INLINE void write(int64_t count, int64_t from, int64_t to, uint8_t* packed, Function&& is_set) {
  for (int64_t byte = from; byte < to; ++byte) {
    const int64_t start = byte * bits_of_byte, length = std::min(bits_of_byte, count - start);
    uint32_t together = 0;
    for (int64_t bit = 0; bit < length; ++bit) {
      together |= static_cast<uint32_t>(is_set(start + bit)) << bit;
    }
    packed[byte] = static_cast<uint8_t>(together);
  }
}

// Calls a function for each element, with its number and its bit.
template <typename Function>
OLLA_FX_INLINE void read(int64_t count, int64_t from, int64_t to, const uint8_t* packed, Function&& take) {
  for (int64_t byte = from; byte < to; ++byte) {
    const int64_t start = byte * bits_of_byte, length = std::min(bits_of_byte, count - start);
    const uint32_t together = packed[byte];
    for (int64_t bit = 0; bit < length; ++bit) {
      take(start + bit, (together >> bit & 1) != 0);
    }
  }
}

// Sets the bits of numbers up to a threshold.
OLLA_FX_VECTORS inline void compare(
    const float* source, float threshold, uint8_t* packed, int64_t count, int64_t from, int64_t to) {
  write(count, from, to, packed, [=](int64_t at) { return source[at] <= threshold; });
}

// Takes numbers, and 0 where a bit is set.
OLLA_FX_VECTORS inline void fill(
    const float* source, const uint8_t* packed, float* result, int64_t count, int64_t from, int64_t to) {
  read(count, from, to, packed, [=](int64_t at, bool is_set) { result[at] = is_set ? 0.0f : source[at]; });
}

// Sets the bits of truth values.
OLLA_FX_VECTORS inline void pack(const uint8_t* mask, uint8_t* packed, int64_t count, int64_t from, int64_t to) {
  write(count, from, to, packed, [=](int64_t at) { return mask[at]; });
}

// Scales numbers whose bit is set.
OLLA_FX_VECTORS inline void scale(
    const float* source, const uint8_t* packed, float factor, float* result, int64_t count, int64_t from,
    int64_t to) {
  read(count, from, to, packed, [=](int64_t at, bool is_set) {
    result[at] = source[at] * static_cast<float>(is_set) * factor;
  });
}

// Calls a function for intervals of the bytes that `count` bits need, in threads.
template <typename Function>
inline void in_threads(int64_t count, Function&& run) {
  at::parallel_for(0, (count + bits_of_byte - 1) / bits_of_byte, items_of_thread(bits_of_byte), run);
}

}  // namespace olla_fx::masks
