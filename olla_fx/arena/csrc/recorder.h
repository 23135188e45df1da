// Records a real step's requests and frees. Knows nothing of any device.
//
// "Profile-guided memory optimization" §4.1: one clock, advanced by every request and every free, gives each
// block its lifetime. Blocks are recognised by address; an address is used again and again within a step, so
// the table holds live blocks only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

namespace olla_fx {

using Address = uintptr_t;

// Live blocks by address. Two live blocks have one address only where the plan shares a place between a dying
// array and the one that is born in it; the older then goes first.
class LiveBlocks {
 public:
  void add(Address address, size_t block) {
    blocks_[address].push_back(block);
  }

  // The oldest live block at the address, which is live no longer.
  std::optional<size_t> take(Address address) {
    const auto found = blocks_.find(address);
    if (found == blocks_.end()) {
      return std::nullopt;
    }
    const size_t block = found->second.front();
    found->second.pop_front();
    if (found->second.empty()) {
      blocks_.erase(found);
    }
    return block;
  }

  void clear() {
    blocks_.clear();
  }

 private:
  std::unordered_map<Address, std::deque<size_t>> blocks_;
};

struct RecordedRequest {
  static constexpr int64_t kNever = -1;

  int64_t op;
  int64_t ordinal;
  int64_t size_bytes;
  Address address;
  bool served;
  int64_t allocated_at = 0;
  int64_t freed_at = kNever;
  int64_t freed_in_operator = kNever;
  bool freed_by_other_thread = false;
};

// The requests of one planning thread, operator by operator.
class RegionRecorder {
 public:
  void allocated(RecordedRequest request) {
    const std::lock_guard<std::mutex> guard(mutex_);
    if (!request.served) {
      // A stock block that stood here went away unseen, or the stock allocator could not reuse its address.
      end_life(request.address, request.op, false);
    }
    request.allocated_at = clock_++;
    live_.add(request.address, requests_.size());
    requests_.push_back(request);
  }

  void freed(Address address, int64_t op, bool by_other_thread) {
    const std::lock_guard<std::mutex> guard(mutex_);
    end_life(address, op, by_other_thread);
  }

  std::vector<RecordedRequest> requests() const {
    const std::lock_guard<std::mutex> guard(mutex_);
    return requests_;
  }

 private:
  void end_life(Address address, int64_t op, bool by_other_thread) {
    if (const std::optional<size_t> block = live_.take(address)) {
      RecordedRequest& request = requests_[*block];
      request.freed_at = clock_++;
      request.freed_in_operator = op;
      request.freed_by_other_thread = by_other_thread;
    }
  }

  mutable std::mutex mutex_;
  LiveBlocks live_;
  std::vector<RecordedRequest> requests_;
  int64_t clock_ = 0;
};

struct AllocationEvent {
  bool is_free;
  size_t block;
  int64_t size_bytes;
  bool on_planning_thread;  // of the request, also in the event of its free
  bool served;              // likewise: whether the block came from a buffer
};

// Every thread's requests and frees, as one stream.
class EventRecorder {
 public:
  void allocated(Address address, int64_t size_bytes, bool on_planning_thread, bool served) {
    const std::lock_guard<std::mutex> guard(mutex_);
    if (!served) {
      end_life(address);
    }
    const size_t block = births_.size();
    live_.add(address, block);
    births_.push_back(events_.size());
    events_.push_back({false, block, size_bytes, on_planning_thread, served});
  }

  void freed(Address address) {
    const std::lock_guard<std::mutex> guard(mutex_);
    end_life(address);
  }

  void clear() {
    const std::lock_guard<std::mutex> guard(mutex_);
    live_.clear();
    births_.clear();
    events_.clear();
  }

  std::vector<AllocationEvent> take_events() {
    const std::lock_guard<std::mutex> guard(mutex_);
    live_.clear();
    births_.clear();
    return std::exchange(events_, {});
  }

 private:
  void end_life(Address address) {
    if (const std::optional<size_t> block = live_.take(address)) {
      const AllocationEvent birth = events_[births_[*block]];
      events_.push_back({true, birth.block, birth.size_bytes, birth.on_planning_thread, birth.served});
    }
  }

  std::mutex mutex_;
  LiveBlocks live_;
  std::vector<size_t> births_;  // block to the index of the event that made it
  std::vector<AllocationEvent> events_;
};

}  // namespace olla_fx
