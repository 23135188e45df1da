// What is particular to a device, and how an operator begins on it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include <c10/core/DeviceType.h>
#include <c10/core/Stream.h>
#include <c10/util/Exception.h>

#include "watchers.h"

namespace olla_fx {

// What is particular to a device.
class DeviceSupport {
 public:
  virtual ~DeviceSupport() = default;

  virtual c10::DeviceType type() const = 0;
  // The calling thread and all kernels see every byte filled when it returns.
  virtual void fill(void* begin, int byte, size_t size_bytes) const = 0;
  // Whether an allocation failed because there is not enough memory.
  virtual bool is_lack_of_memory(const c10::Error& /*error*/) const {
    return true;
  }
  // Where the present device's memory is allocated.
  virtual std::optional<c10::Stream> present_stream() const {
    return std::nullopt;
  }
  // The calling thread is about to run a region.
  virtual void enter(Region& /*region*/) const {}
  // An operator is about to run, and blocks of the buffer are in use elsewhere.
  virtual void wait_for_side_streams(Region& /*region*/) const {}
};

// The one device of the module that includes this; set by bind() for the life of the process.
inline const DeviceSupport* support = nullptr;

// Tells the region that this thread is in which operator runs next; does nothing outside of regions.
inline void begin_operator(int64_t op) {
  Region* region = current_region;
  if (region == nullptr) {
    return;
  }
  region->cursor.begin_operator(op);
  if (C10_UNLIKELY(region->buffer != nullptr && region->buffer->has_side_streams())) {
    support->wait_for_side_streams(*region);
  }
}

}  // namespace olla_fx
