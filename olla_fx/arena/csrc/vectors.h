// How kernels on the CPU run: on vectors and threads.
#pragma once

#include <algorithm>
#include <cstdint>

#include <ATen/Parallel.h>

// Compiles a function several times, for the widest vectors that a processor has; with what it inlines.
// Names of processors would tell these apart from newer ones, so instructions are named.
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define OLLA_FX_VECTORS __attribute__((target_clones("avx512f", "avx2", "default")))
#define OLLA_FX_VECTORS_FUSED __attribute__((target_clones("avx512f", "fma", "default")))
#else
#define OLLA_FX_VECTORS
#define OLLA_FX_VECTORS_FUSED
#endif

#if defined(__GNUC__)
#define OLLA_FX_INLINE inline __attribute__((always_inline))
#else
#define OLLA_FX_INLINE inline
#endif

namespace olla_fx {

// Items for a thread, so that it has enough to do.
inline int64_t items_of_thread(int64_t elements_of_item) {
  constexpr int64_t enough = 32768;  // ATen's own number
  return std::max<int64_t>(1, enough / std::max<int64_t>(1, elements_of_item));
}

}  // namespace olla_fx
