// The CPU allocator that serves a planned step from one buffer (OLLA §3.5).
//
// It stands in front of the stock allocator. Outside planned regions it costs one relaxed load. Inside, it
// serves the thread that entered the region, and no other: which of an operator's worker threads asks first
// changes from run to run, so their requests cannot be planned; they are counted and left to the stock
// allocator.
//
// oneDNN allocates through raw_allocate and frees through raw_deallocate, so the context of every block is its
// address, and one deleter must know the blocks of all kinds apart.

#include <atomic>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <tuple>
#include <utility>
#include <vector>

#include <c10/core/CPUAllocator.h>
#include <pybind11/pybind11.h>

#include "buffer.h"
#include "cursor.h"
#include "recorder.h"
#include "watchers.h"

namespace py = pybind11;

namespace olla_fx {
namespace {

thread_local bool started_events = false;

// Static objects that blocks may need after exit handlers ran are never destroyed.
template <typename T>
T& immortal() {
  static T* object = new T();
  return *object;
}

BufferRegistry& buffers() {
  return immortal<BufferRegistry>();
}

Address address_of(const void* block) {
  return reinterpret_cast<Address>(block);
}

Watchers& watchers() {
  return immortal<Watchers>();
}

// Set once, when the module is loaded.
c10::Allocator* stock = nullptr;
c10::DeleterFnPtr stock_deleter = nullptr;

// Frees a block of any kind: served, or the stock allocator's.
void release(void* block) {
  if (watchers().any_recorder()) {
    watchers().freed(address_of(block));
  }
  const Address address = address_of(block);
  if (current_region != nullptr && current_region->buffer != nullptr &&
      current_region->buffer->contains(address)) {
    current_region->buffer->leave(address);
    // The region holds its buffer, so this cannot be the end of it.
    current_region->buffer->outstanding.fetch_sub(1, std::memory_order_acq_rel);
    return;
  }
  if (!buffers().release(address)) {
    stock_deleter(block);
  }
}

class CpuArenaAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t size) override {
    if (C10_LIKELY(!watchers().any()) || size == 0) {
      return stock->allocate(size);
    }
    Region* region = current_region;
    if (region == nullptr) {
      watchers().count_worker_request();
      return from_stock(size, nullptr);
    }
    if (region->cursor.interrupted()) {
      return from_stock(size, nullptr);
    }
    return answer(*region, size);
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return &release;
  }

  void copy_data(void* destination, const void* source, size_t size) const override {
    default_copy_data(destination, source, size);
  }

 private:
  c10::DataPtr answer(Region& region, size_t size) {
    const auto size_bytes = static_cast<int64_t>(size);
    const Cursor::Answer answer = region.cursor.next(
        size_bytes, [&](int64_t offset) { return region.buffer->occupy(offset, size_bytes); });
    if (answer.verdict != Cursor::Verdict::kServed) {
      return from_stock(size, &region, answer.op, answer.ordinal);
    }
    void* block = region.buffer->at(answer.offset);
    region.buffer->outstanding.fetch_add(1, std::memory_order_relaxed);
    if (C10_UNLIKELY(watchers().any_recorder())) {
      record(block, size_bytes, &region, answer.op, answer.ordinal, true);
    }
    return {block, block, &release, c10::Device(c10::DeviceType::CPU)};
  }

  c10::DataPtr from_stock(size_t size, Region* region, int64_t op = -1, int64_t ordinal = -1) {
    c10::DataPtr block = stock->allocate(size);
    // A recorder must see the block go; other blocks keep the stock deleter, and cost nothing more.
    if (watchers().any_recorder() && block.get() == block.get_context() &&
        block.compare_exchange_deleter(stock_deleter, &release)) {
      record(block.get(), static_cast<int64_t>(size), region, op, ordinal, false);
    }
    return block;
  }

  void record(void* block, int64_t size, Region* region, int64_t op, int64_t ordinal, bool served) {
    if (region != nullptr && region->recorder) {
      region->recorder->allocated({op, ordinal, size, address_of(block), served});
    }
    if (watchers().events_on()) {
      watchers().events.allocated(address_of(block), size, started_events, served);
    }
  }
};

void install() {
  stock = c10::GetAllocator(c10::DeviceType::CPU);
  stock_deleter = stock->raw_deleter();
  if (stock_deleter == nullptr) {
    throw std::runtime_error("the present CPU allocator has no raw deleter, so no arena can stand before it");
  }
  c10::SetAllocator(c10::DeviceType::CPU, &immortal<CpuArenaAllocator>(), 255);
}

// The memory of one or more arenas; goes with the last of them.
class SharedMemory {
 public:
  explicit SharedMemory(int64_t size_bytes) : memory_(make_buffer(size_bytes)) {}

  ~SharedMemory() {
    if (memory_.buffer != nullptr) {
      buffers().abandon(memory_.buffer);
    }
  }

  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  Memory* get() {
    return &memory_;
  }

  bool is_busy() const {
    return memory_.busy.load(std::memory_order_acquire);
  }

  void poison(int byte) {
    if (memory_.buffer != nullptr) {
      std::memset(memory_.buffer->at(0), byte, static_cast<size_t>(memory_.buffer->size_bytes()));
    }
  }

  Address address() const {
    return memory_.buffer == nullptr ? 0 : memory_.buffer->begin();
  }
  int64_t outstanding() const {
    return memory_.buffer == nullptr ? 0 : memory_.buffer->outstanding.load();
  }

 private:
  static Buffer* make_buffer(int64_t size_bytes) {
    if (size_bytes == 0) {
      return nullptr;
    }
    try {
      c10::DataPtr memory = stock->allocate(static_cast<size_t>(size_bytes));
      return buffers().add(std::make_unique<Buffer>(std::move(memory), size_bytes));
    } catch (const c10::Error&) {
      PyErr_Format(PyExc_MemoryError, "cannot allocate a buffer of %lld B",
                   static_cast<long long>(size_bytes));
      throw py::error_already_set();
    }
  }

  Memory memory_;
};

// One program, to be run in a memory.
class Arena {
 public:
  Arena(std::shared_ptr<SharedMemory> memory, int64_t operator_count, const py::iterable& requests)
      : memory_(std::move(memory)), region_(memory_->get(), read_program(operator_count, requests)) {}

  // False if this arena's memory is in use, or this thread in a region.
  bool enter(bool record, bool loose) {
    if (current_region != nullptr || region_.memory->busy.exchange(true, std::memory_order_acq_rel)) {
      return false;
    }
    region_.recorder = record ? std::make_unique<RegionRecorder>() : nullptr;
    region_.worker_requests = 0;
    region_.cursor.start(loose);
    recorded_ = {};
    watchers().enter(&region_);
    current_region = &region_;
    return true;
  }

  // False if this thread did not enter this arena's region.
  bool exit() {
    if (current_region != &region_) {
      return false;
    }
    current_region = nullptr;
    watchers().leave(&region_, region_.recorder != nullptr);
    if (region_.recorder) {
      recorded_ = region_.recorder->requests();
      region_.recorder = nullptr;
    }
    region_.memory->busy.store(false, std::memory_order_release);
    return true;
  }

  py::tuple counters() const {
    const RunCounters& counters = region_.cursor.counters;
    return py::make_tuple(counters.served.get(), counters.served_bytes.get(), counters.outputs.get(),
                          counters.outside.get(), counters.outside_bytes.get(), region_.worker_requests.load());
  }

  py::list outside_log() const {
    py::list log;
    for (const OutsideRequest& request : region_.cursor.counters.log()) {
      log.append(py::make_tuple(request.op, request.ordinal, request.size_bytes));
    }
    return log;
  }

  py::list recording() const {
    py::list rows;
    for (const RecordedRequest& request : recorded_) {
      const bool freed = request.freed_at != RecordedRequest::kNever;
      rows.append(py::make_tuple(request.op, request.ordinal, request.size_bytes, request.address,
                                 request.allocated_at, freed ? py::object(py::int_(request.freed_at)) : py::none(),
                                 freed ? py::object(py::int_(request.freed_in_operator)) : py::none(),
                                 request.freed_by_other_thread, request.served));
    }
    return rows;
  }

 private:
  static Program read_program(int64_t operator_count, const py::iterable& requests) {
    Program program(operator_count);
    for (const py::handle row : requests) {
      const auto [op, ordinal, size_bytes, offset] = row.cast<std::tuple<int64_t, int64_t, int64_t, int64_t>>();
      program.expect(op, ordinal, {size_bytes, offset});
    }
    return program;
  }

  std::shared_ptr<SharedMemory> memory_;
  Region region_;
  std::vector<RecordedRequest> recorded_;
};

bool start_events() {
  if (!watchers().start_events()) {
    return false;
  }
  started_events = true;
  return true;
}

py::list stop_events() {
  started_events = false;
  watchers().stop_events();
  py::list rows;
  for (const AllocationEvent& event : watchers().events.take_events()) {
    rows.append(py::make_tuple(event.is_free, event.block, event.size_bytes, event.on_planning_thread));
  }
  return rows;
}

void interrupt() {
  if (current_region != nullptr) {
    current_region->cursor.interrupt();
  }
}

void resume() {
  if (current_region != nullptr) {
    current_region->cursor.resume();
  }
}

// Called before every operator of a step, so it bypasses pybind11's argument handling.
PyObject* begin_operator(PyObject* /*module*/, PyObject* index) {
  const long op = PyLong_AsLong(index);
  if (op == -1 && PyErr_Occurred() != nullptr) {
    return nullptr;
  }
  if (current_region != nullptr) {
    current_region->cursor.begin_operator(op);
  }
  Py_RETURN_NONE;
}

PyMethodDef begin_operator_method = {
    "begin_operator", begin_operator, METH_O,
    "Tell the region that this thread is in which operator runs next; nothing outside of regions."};

}  // namespace
}  // namespace olla_fx

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  using namespace olla_fx;
  install();
  module.attr("begin_operator") =
      py::reinterpret_steal<py::object>(
          // fx prints a function by its module, so it needs one.
          PyCFunction_NewEx(&begin_operator_method, nullptr, py::str("olla_fx.arena").ptr()));
  module.def("interrupt", &interrupt);
  module.def("resume", &resume);
  module.def("in_region", [] { return current_region != nullptr; });
  module.def("start_events", &start_events);
  module.def("stop_events", &stop_events);
  py::class_<SharedMemory, std::shared_ptr<SharedMemory>>(module, "Memory")
      .def(py::init<int64_t>())
      .def("poison", &SharedMemory::poison)
      .def_property_readonly("is_busy", &SharedMemory::is_busy)
      .def_property_readonly("address", &SharedMemory::address)
      .def_property_readonly("outstanding", &SharedMemory::outstanding);
  py::class_<Arena>(module, "Arena")
      .def(py::init<std::shared_ptr<SharedMemory>, int64_t, py::iterable>())
      .def("enter", &Arena::enter)
      .def("exit", &Arena::exit)
      .def("counters", &Arena::counters)
      .def("outside_log", &Arena::outside_log)
      .def("recording", &Arena::recording);
}
