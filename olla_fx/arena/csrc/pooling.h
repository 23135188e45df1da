// Max-pooling that notes the place of each maximum within its window, in few bits, and its gradient.
//
// A window is searched in ATen's sequence, so that equal maxima, zeros of both signs and NaN are taken as it
// takes them. A place counts the elements of a window, also of those in the padding.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "vectors.h"

namespace olla_fx {

// One dimension: what is pooled, a window, the step to the next one, the padding, the dilation, the maxima.
struct Dimension {
  int64_t size, extent, step, padding, dilation, maxima;

  int64_t begin(int64_t window) const {
    return window * step - padding;
  }

  // The elements of a window that lie in what is pooled are those from first() to before last().
  int64_t first(int64_t window) const {
    const int64_t before = -begin(window);
    return before <= 0 ? 0 : (before + dilation - 1) / dilation;
  }

  int64_t last(int64_t window) const {
    return std::min(extent, (size - begin(window) + dilation - 1) / dilation);
  }

  // The windows whose element `number` lies in what is pooled are those from first_with() to before last_with().
  int64_t first_with(int64_t number) const {
    const int64_t before = padding - number * dilation;
    return before <= 0 ? 0 : std::min(maxima, (before + step - 1) / step);
  }

  int64_t last_with(int64_t number) const {
    const int64_t room = size + padding - number * dilation;
    return room <= 0 ? 0 : std::min(maxima, (room + step - 1) / step);
  }
};

// A pooling of planes or volumes, each with `inner` elements beside each other at a place: the channels in
// channels-last order, else 1.
struct Pooling {
  Dimension depth, height, width;
  int64_t inner, bits;

  int64_t pooled_size() const {
    return depth.size * height.size * width.size * inner;
  }

  // Maxima whose places lie beside each other; the next ones begin with a byte.
  int64_t row_length() const {
    return inner == 1 ? width.maxima : inner;
  }

  int64_t row_bytes() const {
    return (row_length() * bits + 7) / 8;
  }

  int64_t rows_of_plane() const {
    return depth.maxima * height.maxima * (inner == 1 ? 1 : width.maxima);
  }
};

namespace pooling {

// Takes numbers that are larger than the largest so far, and NaN.
template <int64_t Step, typename T>
OLLA_FX_INLINE void take(const T* source, int64_t count, int32_t place, T* largest, int32_t* places) {
  for (int64_t at = 0; at < count; ++at) {
    const T value = source[at * Step];
    const bool is_taken = (value > largest[at]) | (value != value);
    largest[at] = is_taken ? value : largest[at];
    places[at] = is_taken ? place : places[at];
  }
}

template <typename T>
OLLA_FX_INLINE void take(
    const T* source, int64_t step, int64_t count, int32_t place, T* largest, int32_t* places) {
  if (step == 1) {
    take<1>(source, count, place, largest, places);
  } else if (step == 2) {
    take<2>(source, count, place, largest, places);
  } else {
    for (int64_t at = 0; at < count; ++at) {
      take<1>(source + at * step, 1, place, largest + at, places + at);
    }
  }
}

template <int64_t Bits>
OLLA_FX_INLINE void pack(const int32_t* places, int64_t count, uint8_t* packed) {
  constexpr int64_t in_byte = 8 / Bits;
  for (int64_t byte = 0; byte < count / in_byte; ++byte) {
    int32_t together = 0;
    for (int64_t number = 0; number < in_byte; ++number) {
      together |= places[byte * in_byte + number] << (number * Bits);
    }
    packed[byte] = static_cast<uint8_t>(together);
  }
  if (count % in_byte != 0) {
    int32_t together = 0;
    for (int64_t number = 0; number < count % in_byte; ++number) {
      together |= places[count / in_byte * in_byte + number] << (number * Bits);
    }
    packed[count / in_byte] = static_cast<uint8_t>(together);
  }
}

template <int64_t Bits>
OLLA_FX_INLINE void unpack(const uint8_t* packed, int64_t count, int32_t* places) {
  constexpr int64_t in_byte = 8 / Bits;
  for (int64_t at = 0; at < count; ++at) {
    places[at] = (packed[at / in_byte] >> (at % in_byte * Bits)) & ((1 << Bits) - 1);
  }
}

OLLA_FX_INLINE void pack(const int32_t* places, int64_t count, int64_t bits, uint8_t* packed) {
  switch (bits) {
    case 2:
      return pack<2>(places, count, packed);
    case 4:
      return pack<4>(places, count, packed);
    default:
      return pack<8>(places, count, packed);
  }
}

OLLA_FX_INLINE void unpack(const uint8_t* packed, int64_t count, int64_t bits, int32_t* places) {
  switch (bits) {
    case 2:
      return unpack<2>(packed, count, places);
    case 4:
      return unpack<4>(packed, count, places);
    default:
      return unpack<8>(packed, count, places);
  }
}

// The maxima of the windows in one row of windows, all along the width.
template <typename T>
OLLA_FX_INLINE void pool_row(
    const Pooling& pooling, const T* plane, int64_t deep, int64_t high, T* largest, int32_t* places) {
  const Dimension &depth = pooling.depth, &height = pooling.height, &width = pooling.width;
  const int64_t inner = pooling.inner;
  const int64_t start = (depth.first(deep) * height.extent + height.first(high)) * width.extent;
  for (int64_t wide = 0; wide < width.maxima; ++wide) {
    const auto place = static_cast<int32_t>(start + width.first(wide));
    std::fill_n(places + wide * inner, inner, place);
  }
  std::fill_n(largest, width.maxima * inner, -std::numeric_limits<T>::infinity());
  for (int64_t d = depth.first(deep); d < depth.last(deep); ++d) {
    for (int64_t h = height.first(high); h < height.last(high); ++h) {
      const int64_t at_depth = depth.begin(deep) + d * depth.dilation;
      const int64_t at_height = height.begin(high) + h * height.dilation;
      const T* row = plane + (at_depth * height.size + at_height) * width.size * inner;
      for (int64_t w = 0; w < width.extent; ++w) {
        const auto place = static_cast<int32_t>((d * height.extent + h) * width.extent + w);
        const int64_t from = width.first_with(w), to = width.last_with(w);
        if (inner == 1) {
          const T* source = row + width.begin(from) + w * width.dilation;
          take(source, width.step, to - from, place, largest + from, places + from);
        } else {
          for (int64_t wide = from; wide < to; ++wide) {
            const T* source = row + (width.begin(wide) + w * width.dilation) * inner;
            take<1>(source, inner, place, largest + wide * inner, places + wide * inner);
          }
        }
      }
    }
  }
}

// Rows of windows from one number to before another; those of all planes are counted.
template <typename T>
OLLA_FX_INLINE void pool(
    const Pooling& pooling, const T* source, T* maxima, uint8_t* packed, int64_t from, int64_t to) {
  const int64_t in_plane = pooling.depth.maxima * pooling.height.maxima;
  const int64_t in_row = pooling.width.maxima * pooling.inner;
  const int64_t groups = in_row / pooling.row_length();
  std::vector<int32_t> places(static_cast<size_t>(in_row));
  for (int64_t row = from; row < to; ++row) {
    const int64_t number = row % in_plane;
    const T* plane = source + row / in_plane * pooling.pooled_size();
    const int64_t high = number % pooling.height.maxima, deep = number / pooling.height.maxima;
    pool_row(pooling, plane, deep, high, maxima + row * in_row, places.data());
    for (int64_t group = 0; group < groups; ++group) {
      uint8_t* into = packed + (row * groups + group) * pooling.row_bytes();
      pack(places.data() + group * pooling.row_length(), pooling.row_length(), pooling.bits, into);
    }
  }
}

// Adds gradients of maxima to where they were, in ATen's sequence: planes from one number to before another.
template <typename T>
OLLA_FX_INLINE void spread(
    const Pooling& pooling, const T* gradient, const uint8_t* packed, T* result, int64_t from, int64_t to) {
  const Dimension &depth = pooling.depth, &height = pooling.height, &width = pooling.width;
  const int64_t inner = pooling.inner, length = pooling.row_length();
  std::vector<int64_t> offsets;
  for (int64_t d = 0; d < depth.extent; ++d) {
    for (int64_t h = 0; h < height.extent; ++h) {
      for (int64_t w = 0; w < width.extent; ++w) {
        const int64_t row = d * depth.dilation * height.size + h * height.dilation;
        offsets.push_back((row * width.size + w * width.dilation) * inner);
      }
    }
  }
  std::vector<int32_t> places(static_cast<size_t>(length));
  for (int64_t number = from; number < to; ++number) {
    T* plane = result + number * pooling.pooled_size();
    std::fill_n(plane, pooling.pooled_size(), T(0));
    for (int64_t row = 0; row < pooling.rows_of_plane(); ++row) {
      const int64_t group = number * pooling.rows_of_plane() + row;
      unpack(packed + group * pooling.row_bytes(), length, pooling.bits, places.data());
      const T* above = gradient + group * length;
      const int64_t windows = inner == 1 ? row : row / width.maxima;
      const int64_t at_depth = depth.begin(windows / height.maxima);
      const int64_t at_height = height.begin(windows % height.maxima);
      const int64_t wide = inner == 1 ? 0 : row % width.maxima;
      int64_t begin = ((at_depth * height.size + at_height) * width.size + width.begin(wide)) * inner;
      const int64_t step = inner == 1 ? width.step : 1;
      for (int64_t at = 0; at < length; ++at, begin += step) {
        plane[begin + offsets[static_cast<size_t>(places[at])]] += above[at];
      }
    }
  }
}

OLLA_FX_VECTORS inline void pool_floats(
    const Pooling& pooling, const float* source, float* maxima, uint8_t* packed, int64_t from, int64_t to) {
  pool(pooling, source, maxima, packed, from, to);
}

OLLA_FX_VECTORS inline void pool_doubles(
    const Pooling& pooling, const double* source, double* maxima, uint8_t* packed, int64_t from, int64_t to) {
  pool(pooling, source, maxima, packed, from, to);
}

}  // namespace pooling

// Pools planes of floats, or doubles; see Pooling.
inline void max_pool(
    const Pooling& pooling, int64_t planes, const void* source, void* maxima, uint8_t* packed, bool is_double) {
  const int64_t rows = planes * pooling.depth.maxima * pooling.height.maxima;
  const int64_t compared = pooling.depth.extent * pooling.height.extent * pooling.width.extent;
  const int64_t grain = items_of_thread(pooling.width.maxima * pooling.inner * compared);
  at::parallel_for(0, rows, grain, [&](int64_t from, int64_t to) {
    if (is_double) {
      const auto* numbers = static_cast<const double*>(source);
      pooling::pool_doubles(pooling, numbers, static_cast<double*>(maxima), packed, from, to);
    } else {
      const auto* numbers = static_cast<const float*>(source);
      pooling::pool_floats(pooling, numbers, static_cast<float*>(maxima), packed, from, to);
    }
  });
}

// The gradient of max_pool().
inline void max_pool_backward(
    const Pooling& pooling, int64_t planes, const void* gradient, const uint8_t* packed, void* result,
    bool is_double) {
  at::parallel_for(0, planes, items_of_thread(pooling.pooled_size()), [&](int64_t from, int64_t to) {
    if (is_double) {
      const auto* above = static_cast<const double*>(gradient);
      pooling::spread(pooling, above, packed, static_cast<double*>(result), from, to);
    } else {
      const auto* above = static_cast<const float*>(gradient);
      pooling::spread(pooling, above, packed, static_cast<float*>(result), from, to);
    }
  });
}

}  // namespace olla_fx
