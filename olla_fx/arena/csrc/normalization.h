// Batch normalisation with the statistics that forward has kept, and an activation that clamps, in one pass.
//
// ATen's kernels make of the statistics a factor and a summand for each channel, and contract each product with
// the sum behind it, wherever an element lies; so does this. Where ATen's are compiled otherwise, bits differ,
// and a probe says so.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "vectors.h"

namespace olla_fx {

// Floats of `planes` planes, one of each channel after the other, each with `inner` beside each other. In
// channels-last order a place is a plane with one element of each channel.
struct Normalization {
  int64_t planes, channels, inner;
  bool channels_last;
  const float *weight, *bias, *mean, *inverse;  // weight and bias may be null
  float least, most;                            // limits of the activation; infinite for none
};

namespace normalization {

OLLA_FX_INLINE float clamped(float value, float least, float most) {
  const float above = value < least ? least : value;
  return above > most ? most : above;
}

OLLA_FX_VECTORS_FUSED inline void terms(const Normalization& given, float* factors, float* summands) {
  for (int64_t channel = 0; channel < given.channels; ++channel) {
    const float weight = given.weight == nullptr ? 1.0f : given.weight[channel];
    const float bias = given.bias == nullptr ? 0.0f : given.bias[channel];
    factors[channel] = given.inverse[channel] * weight;
    summands[channel] = std::fma(-given.mean[channel], factors[channel], bias);
  }
}

OLLA_FX_VECTORS_FUSED inline void normalize(
    const Normalization& given, const float* factors, const float* summands, const float* source, float* result,
    int64_t from, int64_t to) {
  const float least = given.least, most = given.most;
  if (given.channels_last) {
    for (int64_t place = from; place < to; ++place) {
      const float* numbers = source + place * given.channels;
      float* into = result + place * given.channels;
      for (int64_t channel = 0; channel < given.channels; ++channel) {
        into[channel] = clamped(std::fma(numbers[channel], factors[channel], summands[channel]), least, most);
      }
    }
    return;
  }
  for (int64_t plane = from; plane < to; ++plane) {
    const float factor = factors[plane % given.channels], summand = summands[plane % given.channels];
    const float* numbers = source + plane * given.inner;
    float* into = result + plane * given.inner;
    for (int64_t at = 0; at < given.inner; ++at) {
      into[at] = clamped(std::fma(numbers[at], factor, summand), least, most);
    }
  }
}

}  // namespace normalization

inline void normalize_again(const Normalization& given, const float* source, float* result) {
  std::vector<float> terms(static_cast<size_t>(2 * given.channels));
  float* summands = terms.data() + given.channels;
  normalization::terms(given, terms.data(), summands);
  const int64_t elements = given.channels_last ? given.channels : given.inner;
  at::parallel_for(0, given.planes, items_of_thread(elements), [&](int64_t from, int64_t to) {
    normalization::normalize(given, terms.data(), summands, source, result, from, to);
  });
}

}  // namespace olla_fx
