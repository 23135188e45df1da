// Runs one phase of a planned step: its operators one after the other by the dispatcher, without Python between
// them. What is no operator (arithmetic of numbers, functions written in Python) is called in its place.
//
// Every value has a slot, and is dropped right after its last use, as the generated Python code drops it: the
// order of requests and frees is the plan's. Arguments are made ready when the program is written (arguments.h).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/jit/python/pybind_utils.h>

#include "arguments.h"
#include "gradients.h"
#include "support.h"

namespace olla_fx {

namespace py = pybind11;

// What one phase leaves to the next.
class Kept {
 public:
  Kept() = default;
  explicit Kept(const py::iterable& objects) {
    for (const py::handle object : objects) {
      values.push_back(value_of(object));
    }
  }

  py::list as_list() const {
    py::list objects;
    for (const c10::IValue& value : values) {
      objects.append(torch::jit::toPyObject(value));
    }
    return objects;
  }

  // The last one, which is no longer kept.
  py::object pop() {
    const c10::IValue value = std::move(values.back());
    values.pop_back();
    return torch::jit::toPyObject(value);
  }

  std::vector<c10::IValue> values;
};

struct VISIBILITY_HIDDEN Instruction {
  enum class Kind { kBegin, kOperator, kFunction, kItem, kTake };

  Kind kind;
  int64_t number = -1;  // timestep of an operator that begins, index of an item, position of a gradient
  bool is_made_here = false;
  std::string name;
  std::optional<c10::OperatorHandle> op;
  bool is_of_aten = false;
  std::vector<Argument> arguments;  // of an operator
  py::object function;
  std::vector<int64_t> sources;  // slots that anything else than an operator reads
  int64_t result = -1;
  std::vector<int64_t> dead;  // slots to drop afterwards
};

// A phase. Written once, by Python, in the order in which it runs.
class VISIBILITY_HIDDEN Program {
 public:
  explicit Program(int64_t slot_count) : slot_count_(slot_count) {}

  void begin(int64_t timestep) {
    Instruction& added = add(Instruction::Kind::kBegin, {}, -1, {});
    added.number = timestep;
  }

  // False if the dispatcher does not know the operator.
  bool call_operator(const std::string& name, const std::string& qualified_name, const std::string& overload,
                     const py::tuple& given, const py::dict& named, int64_t result, std::vector<int64_t> dead) {
    const auto op = c10::Dispatcher::singleton().findSchema({qualified_name, overload});
    if (!op) {
      return false;
    }
    const c10::FunctionSchema& schema = op->schema();
    const torch::jit::ToIValueAllowNumbersAsTensors numbers(
        torch::should_allow_numbers_as_tensors(qualified_name.substr(qualified_name.find("::") + 2)));
    std::vector<Argument> arguments;
    for (size_t index = 0; index < schema.arguments().size(); ++index) {
      const c10::Argument& expected = schema.arguments()[index];
      if (index < given.size()) {
        arguments.emplace_back(given[index], expected.real_type(), expected.N());
      } else if (named.contains(expected.name().c_str())) {
        arguments.emplace_back(named[expected.name().c_str()], expected.real_type(), expected.N());
      } else if (expected.default_value()) {
        arguments.emplace_back(*expected.default_value());
      } else {
        throw std::invalid_argument(name + " lacks the argument " + expected.name());
      }
    }
    Instruction& added = add(Instruction::Kind::kOperator, name, result, std::move(dead));
    added.op = op;
    added.is_of_aten = qualified_name.rfind("aten::", 0) == 0;
    added.arguments = std::move(arguments);
    return true;
  }

  void call_function(const std::string& name, py::object function, std::vector<int64_t> sources, int64_t result,
                     std::vector<int64_t> dead) {
    Instruction& added = add(Instruction::Kind::kFunction, name, result, std::move(dead));
    added.function = std::move(function);
    added.sources = std::move(sources);
  }

  void get_item(const std::string& name, int64_t source, int64_t index, int64_t result, std::vector<int64_t> dead) {
    Instruction& added = add(Instruction::Kind::kItem, name, result, std::move(dead));
    added.number = index;
    added.sources = {source};
  }

  void take_gradient(int64_t position, int64_t source, bool is_made_here, std::vector<int64_t> dead) {
    Instruction& added = add(Instruction::Kind::kTake, {}, -1, std::move(dead));
    added.number = position;
    added.is_made_here = is_made_here;
    added.sources = {source};
  }

  // `results`: slots that are returned. `kept`: slots that the next phase takes over. `taken`: where it puts them.
  void finish(std::vector<int64_t> results, std::vector<int64_t> kept, std::vector<int64_t> taken) {
    results_ = std::move(results);
    kept_ = std::move(kept);
    taken_ = std::move(taken);
  }

  // Runs the phase; `inputs` are the values of the first slots. Returns the results; puts what the next phase
  // needs into `kept`, or takes it from there. An operator that fails is named in a note of the exception.
  py::list run(const py::iterable& inputs, Kept* kept, Gradients* gradients) const {
    const Instruction* current = nullptr;
    try {
      HANDLE_TH_ERRORS
      return run_unguarded(inputs, kept, gradients, current);
      END_HANDLE_TH_ERRORS_PYBIND
    } catch (py::error_already_set& error) {
      if (current != nullptr && !current->name.empty()) {
        error.value().attr("add_note")("raised by " + current->name + " in the planned step");
      }
      throw;
    }
  }

 private:
  using Slots = std::vector<c10::IValue>;

  static c10::IValue& at(Slots& slots, int64_t slot) {
    return slots[static_cast<size_t>(slot)];
  }

  Instruction& add(Instruction::Kind kind, std::string name, int64_t result, std::vector<int64_t> dead) {
    Instruction& added = instructions_.emplace_back();
    added.kind = kind;
    added.name = std::move(name);
    added.result = result;
    added.dead = std::move(dead);
    return added;
  }

  py::list run_unguarded(const py::iterable& inputs, Kept* kept, Gradients* gradients,
                         const Instruction*& current) const {
    Slots slots(static_cast<size_t>(slot_count_));
    int64_t next = 0;
    for (const py::handle input : inputs) {
      at(slots, next++) = value_of(input);
    }
    if (!taken_.empty()) {
      Slots values = std::exchange(kept->values, {});
      for (size_t index = 0; index < taken_.size(); ++index) {
        at(slots, taken_[index]) = std::move(values.at(index));
      }
    }
    {
      const at::NoGradGuard no_grad;
      const py::gil_scoped_release without_gil;
      torch::jit::Stack stack;
      for (const Instruction& instruction : instructions_) {
        current = &instruction;
        run_one(instruction, slots, stack, gradients);
        for (const int64_t slot : instruction.dead) {
          at(slots, slot) = {};
        }
      }
    }
    current = nullptr;
    py::list results;
    for (const int64_t slot : results_) {
      results.append(torch::jit::toPyObject(at(slots, slot)));
    }
    if (!kept_.empty()) {
      kept->values.clear();
      for (const int64_t slot : kept_) {
        kept->values.push_back(at(slots, slot));
      }
    }
    return results;
  }

  static void run_one(const Instruction& instruction, Slots& slots, torch::jit::Stack& stack, Gradients* gradients) {
    switch (instruction.kind) {
      case Instruction::Kind::kBegin:
        begin_operator(instruction.number);
        return;
      case Instruction::Kind::kTake:
        gradients->take(instruction.number, at(slots, instruction.sources[0]).toTensor(), instruction.is_made_here);
        return;
      case Instruction::Kind::kItem:
        at(slots, instruction.result) = item(at(slots, instruction.sources[0]), instruction.number);
        return;
      case Instruction::Kind::kFunction:
        at(slots, instruction.result) = called(instruction, slots);
        return;
      case Instruction::Kind::kOperator:
        break;
    }
    stack.clear();
    for (const Argument& argument : instruction.arguments) {
      stack.push_back(argument.value(slots));
    }
    if (instruction.is_of_aten) {
      // No graph of autograd's is made here: without its part of the dispatch a call is shorter.
      const at::AutoDispatchBelowAutograd below_autograd;
      instruction.op->callBoxed(stack);
    } else {
      instruction.op->callBoxed(stack);
    }
    if (stack.size() == 1) {
      at(slots, instruction.result) = std::move(stack.back());
    } else {
      at(slots, instruction.result) = c10::ivalue::Tuple::create(std::move(stack));
    }
    stack.clear();
  }

  static c10::IValue called(const Instruction& instruction, Slots& slots) {
    const py::gil_scoped_acquire gil;
    py::tuple given(instruction.sources.size());
    for (size_t index = 0; index < instruction.sources.size(); ++index) {
      given[index] = torch::jit::toPyObject(at(slots, instruction.sources[index]));
    }
    return value_of(instruction.function(*given));
  }

  static c10::IValue item(const c10::IValue& values, int64_t index) {
    if (values.isTuple()) {
      const auto& elements = values.toTupleRef().elements();
      return elements.at(static_cast<size_t>(index < 0 ? index + static_cast<int64_t>(elements.size()) : index));
    }
    if (values.isList()) {
      const c10::ArrayRef<c10::IValue> elements = values.toListRef();
      return elements.at(static_cast<size_t>(index < 0 ? index + static_cast<int64_t>(elements.size()) : index));
    }
    const py::gil_scoped_acquire gil;
    return value_of(torch::jit::toPyObject(values)[py::int_(index)]);
  }

  int64_t slot_count_;
  std::vector<Instruction> instructions_;
  std::vector<int64_t> results_;
  std::vector<int64_t> kept_;
  std::vector<int64_t> taken_;
};

}  // namespace olla_fx
