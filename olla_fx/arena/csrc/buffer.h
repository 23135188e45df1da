// The one buffer of a plan, and who still lives in it. Knows nothing of any device.
//
// A served block may outlive the plan (a tensor the caller kept): its buffer's memory stays until the last
// such block is freed, and is known until then, so that no free of any other block is ever mistaken for one
// of the buffer's.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include <c10/core/Allocator.h>
#include <c10/core/Stream.h>

#include "recorder.h"

namespace olla_fx {

class Buffer {
 public:
  Buffer(c10::DataPtr memory, int64_t size_bytes) : memory_(std::move(memory)), size_bytes_(size_bytes) {}

  Address begin() const {
    return reinterpret_cast<Address>(memory_.get());
  }
  Address end() const {
    return begin() + static_cast<Address>(size_bytes_);
  }
  bool contains(Address address) const {
    return address >= begin() && address < end();
  }
  void* at(int64_t offset) const {
    return static_cast<char*>(memory_.get()) + offset;
  }
  int64_t size_bytes() const {
    return size_bytes_;
  }
  const c10::DataPtr& memory() const {
    return memory_;
  }

  // Blocks that were served and not yet freed.
  std::atomic<int64_t> outstanding{0};

  // Takes a place if no live block that was placed this way overlaps it.
  bool occupy(int64_t offset, int64_t size_bytes) {
    const std::lock_guard<std::mutex> guard(places_mutex_);
    const auto next = places_.lower_bound(offset);
    const bool meets_next = next != places_.end() && next->first < offset + size_bytes;
    const bool meets_previous = next != places_.begin() && std::prev(next)->second > offset;
    if (meets_next || meets_previous) {
      return false;
    }
    places_.emplace(offset, offset + size_bytes);
    has_places_.store(true, std::memory_order_release);
    return true;
  }

  void leave(Address address) {
    if (has_places_.load(std::memory_order_acquire)) {
      const std::lock_guard<std::mutex> guard(places_mutex_);
      places_.erase(static_cast<int64_t>(address - begin()));
    }
  }

  // Where the memory was allocated, and where the last step ran (at first the same), on devices that have
  // streams; written by whoever holds the memory.
  std::optional<c10::Stream> home_stream;
  std::optional<c10::Stream> last_stream;

  // Streams beside the step's own that work on blocks in here, by record_stream.
  void used_on(c10::Stream stream) {
    const std::lock_guard<std::mutex> guard(streams_mutex_);
    if (std::find(side_streams_.begin(), side_streams_.end(), stream) == side_streams_.end()) {
      side_streams_.push_back(stream);
    }
    has_side_streams_.store(true, std::memory_order_release);
  }
  bool has_side_streams() const {
    return has_side_streams_.load(std::memory_order_acquire);
  }
  std::vector<c10::Stream> side_streams() const {
    const std::lock_guard<std::mutex> guard(streams_mutex_);
    return side_streams_;
  }

 private:
  friend class BufferRegistry;

  c10::DataPtr memory_;
  int64_t size_bytes_;
  bool abandoned_ = false;  // guarded by the registry's mutex
  std::atomic<bool> has_places_{false};
  std::mutex places_mutex_;
  std::map<int64_t, int64_t> places_;  // offset to end of the live blocks placed by occupy()
  std::atomic<bool> has_side_streams_{false};
  mutable std::mutex streams_mutex_;
  std::vector<c10::Stream> side_streams_;
};

// All buffers whose memory exists.
class BufferRegistry {
 public:
  Buffer* add(std::unique_ptr<Buffer> buffer) {
    const std::lock_guard<std::mutex> guard(mutex_);
    Buffer* added = buffer.get();
    buffers_.emplace(added->begin(), std::move(buffer));
    update_bounds();
    return added;
  }

  // The owner is gone: the memory goes with the last block in it.
  void abandon(Buffer* buffer) {
    std::unique_ptr<Buffer> gone;  // goes without the lock: freeing its memory may call anybody
    const std::lock_guard<std::mutex> guard(mutex_);
    buffer->abandoned_ = true;
    gone = remove_if_unused(buffer);
  }

  // False if the address is in no buffer.
  bool release(Address address) {
    if (!may_hold(address)) {
      return false;
    }
    std::unique_ptr<Buffer> gone;  // as in abandon()
    const std::lock_guard<std::mutex> guard(mutex_);
    Buffer* buffer = find(address);
    if (buffer == nullptr) {
      return false;
    }
    buffer->leave(address);
    buffer->outstanding.fetch_sub(1, std::memory_order_acq_rel);
    gone = remove_if_unused(buffer);
    return true;
  }

  // False if the address is in no buffer.
  bool used_on(Address address, c10::Stream stream) {
    if (!may_hold(address)) {
      return false;
    }
    const std::lock_guard<std::mutex> guard(mutex_);
    Buffer* buffer = find(address);
    if (buffer != nullptr) {
      buffer->used_on(stream);
    }
    return buffer != nullptr;
  }

 private:
  bool may_hold(Address address) const {
    return address >= lowest_.load(std::memory_order_relaxed) && address < highest_.load(std::memory_order_relaxed);
  }

  Buffer* find(Address address) {
    const auto after = buffers_.upper_bound(address);
    if (after == buffers_.begin()) {
      return nullptr;
    }
    Buffer* buffer = std::prev(after)->second.get();
    return buffer->contains(address) ? buffer : nullptr;
  }

  std::unique_ptr<Buffer> remove_if_unused(Buffer* buffer) {
    if (!buffer->abandoned_ || buffer->outstanding.load(std::memory_order_acquire) != 0) {
      return nullptr;
    }
    const auto found = buffers_.find(buffer->begin());
    std::unique_ptr<Buffer> removed = std::move(found->second);
    buffers_.erase(found);
    update_bounds();
    return removed;
  }

  // A block's buffer is in the registry as long as the block lives, so whoever frees one sees bounds that
  // hold it; they spare all other frees the lock.
  void update_bounds() {
    lowest_.store(buffers_.empty() ? 0 : buffers_.begin()->second->begin(), std::memory_order_relaxed);
    highest_.store(buffers_.empty() ? 0 : buffers_.rbegin()->second->end(), std::memory_order_relaxed);
  }

  std::mutex mutex_;
  std::map<Address, std::unique_ptr<Buffer>> buffers_;
  std::atomic<Address> lowest_{0};
  std::atomic<Address> highest_{0};
};

}  // namespace olla_fx
