// The arguments of the operators of a program. What a step does not change is converted once, by the rules of
// PyTorch's own bindings, when the program is written; only those that are values of the step, or hold such, are
// put together at every run.
#pragma once

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/ScalarOps.h>
#include <ATen/core/ivalue.h>
#include <torch/csrc/jit/python/pybind_utils.h>

namespace olla_fx {

namespace py = pybind11;

// A value of the step among the arguments of an instruction.
struct Slot {
  int64_t index;
};

inline c10::IValue value_of(const py::handle& object) {
  PyObject* const raw = object.ptr();
  if (THPVariable_Check(raw)) {
    return THPVariable_Unpack(raw);
  }
  if (raw == Py_None) {
    return {};
  }
  if (PyBool_Check(raw)) {
    return raw == Py_True;
  }
  if (PyFloat_CheckExact(raw)) {
    return PyFloat_AS_DOUBLE(raw);
  }
  if (PyComplex_CheckExact(raw)) {
    return c10::complex<double>(PyComplex_RealAsDouble(raw), PyComplex_ImagAsDouble(raw));
  }
  if (PyLong_CheckExact(raw)) {
    int overflow = 0;
    const int64_t number = PyLong_AsLongLongAndOverflow(raw, &overflow);
    if (overflow == 0) {
      return number;
    }
  }
  return torch::jit::toIValue(object, c10::PyObjectType::get());
}

// One argument of an operator.
class Argument {
 public:
  Argument(const py::handle& object, const c10::TypePtr& type, std::optional<int32_t> repeated) : type_(type) {
    const c10::TypePtr inner = without_optional(type);
    if (py::isinstance<Slot>(object)) {
      kind_ = Kind::kSlot;
      slot_ = object.cast<Slot>().index;
      is_tensor_ = inner->kind() == c10::TypeKind::TensorType;
      is_float_ = inner->kind() == c10::TypeKind::FloatType;
    } else if (inner->kind() == c10::TypeKind::TensorType && PyNumber_Check(object.ptr()) != 0 &&
               !THPVariable_Check(object.ptr())) {
      kind_ = Kind::kNumber;
      constant_ = torch::jit::toIValue(object, c10::NumberType::get());
    } else if (inner->kind() == c10::TypeKind::ListType && holds_slots(object)) {
      kind_ = Kind::kList;
      item_type_ = inner->castRaw<c10::ListType>()->getElementType();
      if (item_type_->kind() == c10::TypeKind::SymIntType) {
        item_type_ = c10::IntType::get();  // as symbols are not known when a step runs
      }
      for (const py::handle item : object) {
        items_.emplace_back(item, item_type_, std::nullopt);
      }
    } else {
      constant_ = torch::jit::toIValue(object, type, repeated);
    }
  }

  explicit Argument(c10::IValue constant) : constant_(std::move(constant)) {}

  c10::IValue value(const std::vector<c10::IValue>& slots) const {
    switch (kind_) {
      case Kind::kConstant:
        return constant_;
      case Kind::kNumber:
        return as_tensor(constant_);
      case Kind::kSlot:
        return of_slot(slots[static_cast<size_t>(slot_)]);
      case Kind::kList:
        break;
    }
    c10::impl::GenericList list(item_type_);
    list.reserve(items_.size());
    for (const Argument& item : items_) {
      list.push_back(item.value(slots));
    }
    return list;
  }

 private:
  enum class Kind { kConstant, kNumber, kSlot, kList };

  static c10::TypePtr without_optional(const c10::TypePtr& type) {
    const auto* optional = type->castRaw<c10::OptionalType>();
    return optional == nullptr ? type : optional->getElementType();
  }

  static bool holds_slots(const py::handle& object) {
    if (!PyList_Check(object.ptr()) && !PyTuple_Check(object.ptr())) {
      return false;
    }
    for (const py::handle item : object) {
      if (py::isinstance<Slot>(item)) {
        return true;
      }
    }
    return false;
  }

  // Made at every call, as by PyTorch's own bindings: its memory is among the operator's requests.
  static at::Tensor as_tensor(const c10::IValue& number) {
    at::Tensor tensor = at::scalar_to_tensor(number.toScalar());
    tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
    return tensor;
  }

  c10::IValue of_slot(const c10::IValue& value) const {
    if (is_tensor_ && value.isScalar()) {
      return as_tensor(value);
    }
    if (is_float_ && (value.isInt() || value.isBool())) {
      return value.toScalar().toDouble();
    }
    if (C10_UNLIKELY(value.isPyObject())) {
      const py::gil_scoped_acquire gil;
      return torch::jit::toIValue(torch::jit::toPyObject(value), type_);
    }
    return value;
  }

  Kind kind_ = Kind::kConstant;
  bool is_tensor_ = false;
  bool is_float_ = false;
  int64_t slot_ = -1;
  c10::TypePtr type_;
  c10::TypePtr item_type_;
  c10::IValue constant_;
  std::vector<Argument> items_;
};

}  // namespace olla_fx
