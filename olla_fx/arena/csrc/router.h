// Who answers a request: the buffer of the region that the thread is in, or the stock allocator. Knows nothing
// of any device.
//
// Outside planned regions it costs one relaxed load. Inside, it serves the thread that entered the region, and
// no other: which of an operator's worker threads asks first changes from run to run, so their requests cannot
// be planned; they are counted and left to the stock allocator.
//
// Kernel libraries allocate through raw_allocate and free through raw_deallocate, so the context of every block
// is its address, and one deleter must know the blocks of all kinds apart.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>

#include <c10/core/Allocator.h>

#include "buffer.h"
#include "cursor.h"
#include "recorder.h"
#include "watchers.h"

namespace olla_fx {

inline Address address_of(const void* block) {
  return reinterpret_cast<Address>(block);
}

// Whether this thread started the recording of events.
inline thread_local bool started_events = false;

class Router {
 public:
  // The deleter of every block that the router hands out: release() of the module's one router.
  Router(c10::Allocator* stock, c10::DeleterFnPtr releaser)
      : stock_(stock), stock_deleter_(stock->raw_deleter()), releaser_(releaser) {
    if (stock_deleter_ == nullptr) {
      throw std::runtime_error("the present allocator has no raw deleter, so no arena can stand before it");
    }
  }

  c10::Allocator* stock() const {
    return stock_;
  }
  c10::DeleterFnPtr stock_deleter() const {
    return stock_deleter_;
  }

  // Whether a request may be of anybody's interest; otherwise the stock allocator is all there is.
  bool listens() const {
    return watchers.any();
  }

  // A request of the calling thread. `planned`: false for one that no plan can hold, on another stream, say.
  c10::DataPtr allocate(size_t size, c10::Device device, bool planned = true) {
    Region* region = current_region;
    if (region == nullptr || !planned) {
      watchers.count_worker_request();
      return from_stock(size, nullptr);
    }
    if (region->cursor.interrupted()) {
      return from_stock(size, nullptr);
    }
    return answer(*region, size, device);
  }

  // Frees a block of any kind: served, or the stock allocator's.
  void release(void* block) {
    if (watchers.any_recorder()) {
      watchers.freed(address_of(block));
    }
    const Address address = address_of(block);
    if (current_region != nullptr && current_region->buffer != nullptr &&
        current_region->buffer->contains(address)) {
      current_region->buffer->leave(address);
      // The region holds its buffer, so this cannot be the end of it.
      current_region->buffer->outstanding.fetch_sub(1, std::memory_order_acq_rel);
      return;
    }
    if (!buffers.release(address)) {
      stock_deleter_(block);
    }
  }

  BufferRegistry buffers;
  Watchers watchers;

 private:
  c10::DataPtr answer(Region& region, size_t size, c10::Device device) {
    const auto size_bytes = static_cast<int64_t>(size);
    const Cursor::Answer answer = region.cursor.next(
        size_bytes, [&](int64_t offset) { return region.buffer->occupy(offset, size_bytes); });
    if (answer.verdict != Cursor::Verdict::kServed) {
      return from_stock(size, &region, answer.op, answer.ordinal);
    }
    void* block = region.buffer->at(answer.offset);
    region.buffer->outstanding.fetch_add(1, std::memory_order_relaxed);
    if (C10_UNLIKELY(watchers.any_recorder())) {
      record(block, size_bytes, &region, answer.op, answer.ordinal, true);
    }
    return {block, block, releaser_, device};
  }

  c10::DataPtr from_stock(size_t size, Region* region, int64_t op = -1, int64_t ordinal = -1) {
    c10::DataPtr block = stock_->allocate(size);
    // A recorder must see the block go; other blocks keep the stock deleter, and cost nothing more.
    if (watchers.any_recorder() && block.get() == block.get_context() &&
        block.compare_exchange_deleter(stock_deleter_, releaser_)) {
      record(block.get(), static_cast<int64_t>(size), region, op, ordinal, false);
    }
    return block;
  }

  void record(void* block, int64_t size, Region* region, int64_t op, int64_t ordinal, bool served) {
    if (region != nullptr && region->recorder) {
      region->recorder->allocated({op, ordinal, size, address_of(block), served});
    }
    if (watchers.events_on()) {
      watchers.events.allocated(address_of(block), size, started_events, served);
    }
  }

  c10::Allocator* stock_;
  c10::DeleterFnPtr stock_deleter_;
  c10::DeleterFnPtr releaser_;
};

}  // namespace olla_fx
