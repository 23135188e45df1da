// What Python sees of a native allocator, the same for every device: memories, arenas, and the recording of
// events.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include <c10/core/DeviceGuard.h>
#include <c10/util/Exception.h>
#include <pybind11/pybind11.h>

#include "accumulation.h"
#include "gradients.h"
#include "program.h"
#include "router.h"
#include "support.h"

namespace olla_fx {

namespace py = pybind11;

// The one router of the module that includes this; set by bind() for the life of the process, because blocks may
// need it after exit handlers ran.
inline Router* router = nullptr;

// The memory of one or more arenas; goes with the last of them.
class SharedMemory {
 public:
  SharedMemory(int64_t size_bytes, int64_t device_index)
      : SharedMemory(size_bytes, c10::Device(support->type(), static_cast<c10::DeviceIndex>(device_index))) {}

  ~SharedMemory() {
    if (memory_.buffer != nullptr) {
      router->buffers.abandon(memory_.buffer);
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
      const c10::OptionalDeviceGuard guard = guard_of(memory_.buffer->memory().device());
      support->fill(memory_.buffer->at(0), byte, static_cast<size_t>(memory_.buffer->size_bytes()));
    }
  }

  Address address() const {
    return memory_.buffer == nullptr ? 0 : memory_.buffer->begin();
  }
  int64_t outstanding() const {
    return memory_.buffer == nullptr ? 0 : memory_.buffer->outstanding.load();
  }

 private:
  SharedMemory(int64_t size_bytes, c10::Device device) : memory_(make_buffer(size_bytes, device), device) {}

  // Makes a device the present one; without an index, leaves that as it is.
  static c10::OptionalDeviceGuard guard_of(c10::Device device) {
    return c10::OptionalDeviceGuard(device.has_index() ? std::optional(device) : std::nullopt);
  }

  static Buffer* make_buffer(int64_t size_bytes, c10::Device device) {
    if (size_bytes == 0) {
      return nullptr;
    }
    try {
      const c10::OptionalDeviceGuard guard = guard_of(device);
      c10::DataPtr memory = router->stock()->allocate(static_cast<size_t>(size_bytes));
      auto buffer = std::make_unique<Buffer>(std::move(memory), size_bytes);
      buffer->home_stream = buffer->last_stream = support->present_stream();
      return router->buffers.add(std::move(buffer));
    } catch (const c10::Error& error) {
      if (!support->is_lack_of_memory(error)) {
        throw;
      }
      PyErr_Format(PyExc_MemoryError, "cannot allocate a buffer of %lld B: %s", static_cast<long long>(size_bytes),
                   error.what_without_backtrace());
      throw py::error_already_set();
    }
  }

  Memory memory_;
};

// One allocation table, to be run in a memory.
class Arena {
 public:
  Arena(std::shared_ptr<SharedMemory> memory, int64_t operator_count, const py::iterable& requests)
      : memory_(std::move(memory)), region_(memory_->get(), read_table(operator_count, requests)) {}

  // False if this arena's memory is in use, or this thread in a region.
  bool enter(bool record) {
    if (current_region != nullptr || region_.memory->busy.exchange(true, std::memory_order_acq_rel)) {
      return false;
    }
    try {
      support->enter(region_);
    } catch (...) {
      region_.memory->busy.store(false, std::memory_order_release);
      throw;
    }
    region_.recorder = record ? std::make_unique<RegionRecorder>() : nullptr;
    region_.worker_requests = 0;
    region_.cursor.start();
    recorded_ = {};
    router->watchers.enter(&region_);
    current_region = &region_;
    return true;
  }

  // False if this thread did not enter this arena's region.
  bool exit() {
    if (current_region != &region_) {
      return false;
    }
    current_region = nullptr;
    router->watchers.leave(&region_, region_.recorder != nullptr);
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
  static AllocationTable read_table(int64_t operator_count, const py::iterable& requests) {
    AllocationTable table(operator_count);
    for (const py::handle row : requests) {
      const auto [op, ordinal, size_bytes, offset] = row.cast<std::tuple<int64_t, int64_t, int64_t, int64_t>>();
      table.expect(op, ordinal, {size_bytes, offset});
    }
    return table;
  }

  std::shared_ptr<SharedMemory> memory_;
  Region region_;
  std::vector<RecordedRequest> recorded_;
};

inline bool start_events() {
  if (!router->watchers.start_events()) {
    return false;
  }
  started_events = true;
  return true;
}

inline py::list stop_events() {
  started_events = false;
  router->watchers.stop_events();
  py::list rows;
  for (const AllocationEvent& event : router->watchers.events.take_events()) {
    rows.append(py::make_tuple(event.is_free, event.block, event.size_bytes, event.on_planning_thread,
                               event.served));
  }
  return rows;
}

inline void interrupt() {
  if (current_region != nullptr) {
    current_region->cursor.interrupt();
  }
}

inline void resume() {
  if (current_region != nullptr) {
    current_region->cursor.resume();
  }
}

// For emitted Python code, before every operator of a step, so it bypasses pybind11's argument handling.
inline PyObject* begin_operator_in_python(PyObject* /*module*/, PyObject* index) {
  const long op = PyLong_AsLong(index);
  if (op == -1 && PyErr_Occurred() != nullptr) {
    return nullptr;
  }
  try {
    begin_operator(op);
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
  Py_RETURN_NONE;
}

inline PyMethodDef begin_operator_method = {
    "begin_operator", begin_operator_in_python, METH_O,
    "Tell the region that this thread is in which operator runs next; nothing outside of regions."};

inline void bind_programs(py::module& module) {
  py::class_<LeftGradients, std::shared_ptr<LeftGradients>>(module, "LeftGradients", py::module_local())
      .def("any_alive", &LeftGradients::any_alive)
      .def("alive", &LeftGradients::alive)
      .def("take", &LeftGradients::take)
      .def("put_back", &LeftGradients::put_back);
  py::class_<Gradients>(module, "Gradients", py::module_local())
      .def(py::init<py::iterable, py::iterable, py::iterable>())
      .def("leave_out", &Gradients::leave_out)
      .def("accumulate_directly", &Gradients::accumulate_directly)
      .def("cut_edges", &Gradients::cut_edges)
      .def("suited", &Gradients::suited)
      .def("take", [](Gradients& gradients, int64_t position, const py::handle& gradient,
                      bool is_made_here) { gradients.take(position, tensor_of(gradient), is_made_here); })
      .def("for_autograd", &Gradients::for_autograd)
      .def_readonly("left", &Gradients::left);
  py::class_<Slot>(module, "Slot", py::module_local()).def(py::init<int64_t>());
  py::class_<Kept>(module, "Kept", py::module_local())
      .def(py::init<>())
      .def(py::init<py::iterable>())
      .def("values", &Kept::as_list)
      .def("pop", &Kept::pop);
  py::class_<Program>(module, "Program", py::module_local())
      .def(py::init<int64_t>())
      .def("begin", &Program::begin)
      .def("call_operator", &Program::call_operator)
      .def("call_function", &Program::call_function)
      .def("get_item", &Program::get_item)
      .def("take_gradient", &Program::take_gradient)
      .def("finish", &Program::finish)
      .def("run", &Program::run);
}

// Fills a Python module; the router and the device's support must live as long as the process.
inline void bind(py::module& module, Router& its_router, const DeviceSupport& its_support) {
  router = &its_router;
  support = &its_support;
  module.attr("begin_operator") =
      py::reinterpret_steal<py::object>(
          // fx prints a function by its module, so it needs one.
          PyCFunction_NewEx(&begin_operator_method, nullptr, py::str("olla_fx.arena").ptr()));
  module.def("interrupt", &interrupt);
  module.def("resume", &resume);
  module.def("in_region", [] { return current_region != nullptr; });
  module.def("shares_storage", &shares_storage);
  module.def("start_events", &start_events);
  module.def("stop_events", &stop_events);
  bind_programs(module);
  py::class_<SharedMemory, std::shared_ptr<SharedMemory>>(module, "Memory", py::module_local())
      .def(py::init<int64_t, int64_t>())
      .def("poison", &SharedMemory::poison)
      .def_property_readonly("is_busy", &SharedMemory::is_busy)
      .def_property_readonly("address", &SharedMemory::address)
      .def_property_readonly("outstanding", &SharedMemory::outstanding);
  py::class_<Arena>(module, "Arena", py::module_local())
      .def(py::init<std::shared_ptr<SharedMemory>, int64_t, py::iterable>())
      .def("enter", &Arena::enter)
      .def("exit", &Arena::exit)
      .def("counters", &Arena::counters)
      .def("outside_log", &Arena::outside_log)
      .def("recording", &Arena::recording);
}

}  // namespace olla_fx
