// What a planned region expects, and where in it the running step is. Knows nothing of any device.
//
// The method is OLLA §3.5 and "Profile-guided memory optimization" §4.2: the k-th request gets the k-th
// address. Here k counts anew within every operator, and a request must fit into the planned size (§4.3 there:
// smaller ones reuse the place), so that a step which strays from the plan strays for one operator only. A request that does not match is not an
// error: it is counted, and the caller of next() sends it to the stock allocator.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <stdexcept>
#include <utility>
#include <vector>

namespace olla_fx {

// Offset of a request that is left to the stock allocator on purpose: an output array.
constexpr int64_t kOutsideOnPurpose = -1;

struct PlannedRequest {
  int64_t size_bytes = -1;  // a size that no request has: fills ordinals nothing was planned for
  int64_t offset = kOutsideOnPurpose;
};

// For every operator the requests that are expected of it, by ordinal.
class AllocationTable {
 public:
  explicit AllocationTable(int64_t operator_count) : expected_(static_cast<size_t>(operator_count)) {}

  void expect(int64_t op, int64_t ordinal, PlannedRequest request) {
    if (op < 0 || op >= operator_count() || ordinal < 0) {
      throw std::invalid_argument("a planned request refers to an operator that does not exist");
    }
    std::vector<PlannedRequest>& requests = expected_[static_cast<size_t>(op)];
    if (requests.size() <= static_cast<size_t>(ordinal)) {
      requests.resize(static_cast<size_t>(ordinal) + 1);
    }
    requests[static_cast<size_t>(ordinal)] = request;
  }

  int64_t operator_count() const {
    return static_cast<int64_t>(expected_.size());
  }

  // None for an operator beyond the table: what it requests is outside.
  const std::vector<PlannedRequest>* of(int64_t op) const {
    const bool known = op >= 0 && op < operator_count();
    return known ? &expected_[static_cast<size_t>(op)] : nullptr;
  }

 private:
  std::vector<std::vector<PlannedRequest>> expected_;
};

// A count with one writing thread and any number of readers.
class Tally {
 public:
  void add(int64_t amount) {
    count_.store(get() + amount, std::memory_order_relaxed);
  }
  void reset(int64_t count = 0) {
    count_.store(count, std::memory_order_relaxed);
  }
  int64_t get() const {
    return count_.load(std::memory_order_relaxed);
  }

 private:
  std::atomic<int64_t> count_{0};
};

struct OutsideRequest {
  int64_t op;
  int64_t ordinal;
  int64_t size_bytes;
};

// Counts of one run of a region, and the first few requests that the plan did not foresee.
struct RunCounters {
  static constexpr size_t kLogCapacity = 256;

  Tally served, served_bytes, outputs, outside, outside_bytes;

  void reset() {
    for (Tally* tally : {&served, &served_bytes, &outputs, &outside, &outside_bytes}) {
      tally->reset();
    }
    const std::lock_guard<std::mutex> guard(log_mutex_);
    log_.clear();
  }

  void count_outside(OutsideRequest request) {
    outside.add(1);
    outside_bytes.add(request.size_bytes);
    const std::lock_guard<std::mutex> guard(log_mutex_);
    if (log_.size() < kLogCapacity) {
      log_.push_back(request);
    }
  }

  std::vector<OutsideRequest> log() const {
    const std::lock_guard<std::mutex> guard(log_mutex_);
    return log_;
  }

 private:
  mutable std::mutex log_mutex_;
  std::vector<OutsideRequest> log_;
};

// Position of a running step in its allocation table. Only the thread that entered the region writes it; other
// threads may ask which operator is running.
class Cursor {
 public:
  enum class Verdict { kServed, kOutput, kOutside };

  struct Answer {
    Verdict verdict;
    int64_t offset;
    int64_t op;
    int64_t ordinal;
  };

  explicit Cursor(AllocationTable table) : table_(std::move(table)) {}

  void start() {
    interruptions_ = 0;
    counters.reset();
    go_to(-1);
  }

  void begin_operator(int64_t op) {
    if (!interrupted()) {
      go_to(op);
    }
  }

  void interrupt() {
    ++interruptions_;
  }
  void resume() {
    interruptions_ -= interruptions_ > 0 ? 1 : 0;
  }
  bool interrupted() const {
    return interruptions_ > 0;
  }
  int64_t current_operator() const {
    return operator_.get();
  }

  // Takes the next request. `occupy(offset)` says whether its place is free. In a step that requests what
  // was recorded it always is; where a kernel makes other requests than then, a result may stand in the place
  // of scratch memory, and whoever comes next to that place must go elsewhere.
  template <typename Occupy>
  Answer next(int64_t size_bytes, Occupy occupy) {
    const int64_t ordinal = ordinal_++;
    const int64_t op = current_operator();
    const PlannedRequest* planned = at(ordinal);
    if (planned != nullptr && planned->size_bytes >= size_bytes) {
      if (planned->offset == kOutsideOnPurpose) {
        counters.outputs.add(1);
        return {Verdict::kOutput, kOutsideOnPurpose, op, ordinal};
      }
      if (occupy(planned->offset)) {
        counters.served.add(1);
        counters.served_bytes.add(size_bytes);
        return {Verdict::kServed, planned->offset, op, ordinal};
      }
    }
    counters.count_outside({op, ordinal, size_bytes});
    return {Verdict::kOutside, kOutsideOnPurpose, op, ordinal};
  }

  RunCounters counters;

 private:
  void go_to(int64_t op) {
    operator_.reset(op);
    ordinal_ = 0;
    expected_ = table_.of(op);
  }

  const PlannedRequest* at(int64_t ordinal) const {
    const bool planned = expected_ != nullptr && static_cast<size_t>(ordinal) < expected_->size();
    return planned ? &(*expected_)[static_cast<size_t>(ordinal)] : nullptr;
  }

  AllocationTable table_;
  const std::vector<PlannedRequest>* expected_ = nullptr;
  Tally operator_;
  int64_t ordinal_ = 0;
  int64_t interruptions_ = 0;
};

}  // namespace olla_fx
