// Who is to hear of requests at the moment: the regions that threads run in, and the recorder of events.
// Knows nothing of any device.
#pragma once

#include <atomic>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include "buffer.h"
#include "cursor.h"
#include "recorder.h"

namespace olla_fx {

// A buffer that any number of allocation tables may use, one at a time.
struct Memory {
  Memory(Buffer* its_buffer, c10::Device its_device) : buffer(its_buffer), device(its_device) {}

  Buffer* buffer;  // null where no byte is planned
  c10::Device device;  // without an index: the present one
  std::atomic<bool> busy{false};
};

// One allocation table in its memory, and the run of it that is under way.
struct Region {
  Region(Memory* its_memory, AllocationTable table)
      : memory(its_memory), buffer(its_memory->buffer), cursor(std::move(table)) {}

  Memory* memory;
  Buffer* buffer;
  Cursor cursor;
  std::unique_ptr<RegionRecorder> recorder;
  std::atomic<int64_t> worker_requests{0};
  std::optional<c10::Stream> stream;  // of the run under way, on devices that have streams
};

inline thread_local Region* current_region = nullptr;

// Everything that watches requests at the moment.
class Watchers {
 public:
  bool any() const {
    return watching_.load(std::memory_order_relaxed) != 0;
  }
  bool any_recorder() const {
    return recording_.load(std::memory_order_relaxed) != 0;
  }
  bool events_on() const {
    return events_on_.load(std::memory_order_acquire);
  }

  void enter(Region* region) {
    const std::lock_guard<std::mutex> guard(mutex_);
    regions_.push_back(region);
    recording_ += region->recorder ? 1 : 0;
    ++watching_;
  }

  void leave(Region* region, bool was_recording) {
    const std::lock_guard<std::mutex> guard(mutex_);
    regions_.remove(region);
    recording_ -= was_recording ? 1 : 0;
    --watching_;
  }

  bool start_events() {
    if (events_on_.exchange(true)) {
      return false;
    }
    events.clear();
    ++recording_;
    ++watching_;
    return true;
  }

  void stop_events() {
    if (events_on_.exchange(false)) {
      --recording_;
      --watching_;
    }
  }

  void count_worker_request() {
    const std::lock_guard<std::mutex> guard(mutex_);
    for (Region* region : regions_) {
      region->worker_requests.fetch_add(1, std::memory_order_relaxed);
    }
  }

  // Called before the block goes back: afterwards another thread may be given its address.
  void freed(Address block) {
    if (events_on()) {
      events.freed(block);
    }
    const std::lock_guard<std::mutex> guard(mutex_);
    for (Region* region : regions_) {
      if (region->recorder) {
        const bool by_other_thread = region != current_region;
        region->recorder->freed(block, region->cursor.current_operator(), by_other_thread);
      }
    }
  }

  EventRecorder events;

 private:
  std::atomic<int> watching_{0};
  std::atomic<int> recording_{0};
  std::atomic<bool> events_on_{false};
  std::mutex mutex_;
  std::list<Region*> regions_;
};

}  // namespace olla_fx
