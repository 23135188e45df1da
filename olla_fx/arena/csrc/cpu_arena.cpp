// The CPU allocator that serves a planned step from one buffer (OLLA §3.5): stands in front of the stock
// allocator from the moment its module is loaded.

#include <cstring>

#include <c10/core/CPUAllocator.h>
#include <pybind11/pybind11.h>

#include "module.h"

namespace olla_fx {
namespace {

void release(void* block) {
  router->release(block);
}

class CpuArenaAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t size) override {
    if (C10_LIKELY(!router->listens()) || size == 0) {
      return router->stock()->allocate(size);
    }
    return router->allocate(size, c10::Device(c10::DeviceType::CPU));
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return &release;
  }

  void copy_data(void* destination, const void* source, size_t size) const override {
    default_copy_data(destination, source, size);
  }
};

class CpuSupport final : public DeviceSupport {
 public:
  c10::DeviceType type() const override {
    return c10::DeviceType::CPU;
  }
  void fill(void* begin, int byte, size_t size_bytes) const override {
    std::memset(begin, byte, size_bytes);
  }
};

}  // namespace
}  // namespace olla_fx

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  using namespace olla_fx;
  bind(module, *new Router(c10::GetAllocator(c10::DeviceType::CPU), &release), *new CpuSupport());
  c10::SetAllocator(c10::DeviceType::CPU, new CpuArenaAllocator(), 255);
}
