// Kernels on the CPU that ATen does not have: each reads or writes less than a composition of ATen's would,
// and gives the same bits. They take addresses; olla_fx/kernels.py says of what.

#include <array>
#include <cstdint>

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "masks.h"
#include "normalization.h"
#include "pooling.h"

namespace olla_fx {
namespace {

namespace py = pybind11;

using Numbers = std::array<int64_t, 6>;

Dimension dimension_of(const Numbers& numbers) {
  return {numbers[0], numbers[1], numbers[2], numbers[3], numbers[4], numbers[5]};
}

Pooling pooling_of(const std::array<Numbers, 3>& dimensions, int64_t inner, int64_t bits) {
  return {dimension_of(dimensions[0]), dimension_of(dimensions[1]), dimension_of(dimensions[2]), inner, bits};
}

template <typename T>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

}  // namespace
}  // namespace olla_fx

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  using namespace olla_fx;
  const py::call_guard<py::gil_scoped_release> released;
  module.def(
      "max_pool",
      [](const std::array<Numbers, 3>& dimensions, int64_t inner, int64_t bits, int64_t planes, uintptr_t source,
         uintptr_t maxima, uintptr_t packed, bool is_double) {
        max_pool(
            pooling_of(dimensions, inner, bits), planes, pointer<void>(source), pointer<void>(maxima), pointer<uint8_t>(packed),
            is_double);
      },
      released);
  module.def(
      "max_pool_backward",
      [](const std::array<Numbers, 3>& dimensions, int64_t inner, int64_t bits, int64_t planes,
         uintptr_t gradient, uintptr_t packed, uintptr_t result, bool is_double) {
        max_pool_backward(
            pooling_of(dimensions, inner, bits), planes, pointer<void>(gradient), pointer<uint8_t>(packed),
            pointer<void>(result), is_double);
      },
      released);
  module.def(
      "normalize_again",
      [](int64_t planes, int64_t channels, int64_t inner, bool channels_last, uintptr_t weight, uintptr_t bias,
         uintptr_t mean, uintptr_t inverse, float least, float most, uintptr_t source, uintptr_t result) {
        const Normalization given{planes, channels, inner, channels_last, pointer<float>(weight),
                                  pointer<float>(bias), pointer<float>(mean), pointer<float>(inverse), least, most};
        normalize_again(given, pointer<float>(source), pointer<float>(result));
      },
      released);
  module.def(
      "compare",
      [](uintptr_t source, float threshold, uintptr_t packed, int64_t count) {
        masks::in_threads(count, [=](int64_t from, int64_t to) {
          masks::compare(pointer<float>(source), threshold, pointer<uint8_t>(packed), count, from, to);
        });
      },
      released);
  module.def(
      "fill",
      [](uintptr_t source, uintptr_t packed, uintptr_t result, int64_t count) {
        masks::in_threads(count, [=](int64_t from, int64_t to) {
          masks::fill(
              pointer<float>(source), pointer<uint8_t>(packed), pointer<float>(result), count, from, to);
        });
      },
      released);
  module.def(
      "pack",
      [](uintptr_t mask, uintptr_t packed, int64_t count) {
        masks::in_threads(count, [=](int64_t from, int64_t to) {
          masks::pack(pointer<uint8_t>(mask), pointer<uint8_t>(packed), count, from, to);
        });
      },
      released);
  module.def(
      "scale",
      [](uintptr_t source, uintptr_t packed, float factor, uintptr_t result, int64_t count) {
        masks::in_threads(count, [=](int64_t from, int64_t to) {
          masks::scale(
              pointer<float>(source), pointer<uint8_t>(packed), factor, pointer<float>(result), count, from, to);
        });
      },
      released);
}
