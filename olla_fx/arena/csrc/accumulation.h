// Adds a gradient to a leaf's .grad in autograd's place, in the middle of a backward.
//
// Autograd adds up what all edges bring to a leaf and then adds the sum to .grad once. If one edge alone leads
// to the leaf, the backward behind that edge may add its gradient itself, earlier: the arithmetic is the same.
#pragma once

#include <ATen/Tensor.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>

#include "watchers.h"

namespace olla_fx {

namespace py = pybind11;

inline const at::Tensor& tensor_of(const py::handle& object) {
  if (!THPVariable_Check(object.ptr())) {
    throw pybind11::type_error("not a tensor");
  }
  return THPVariable_Unpack(object.ptr());
}

inline bool has_hooks(torch::autograd::Node& accumulator) {
  return !accumulator.tensor_pre_hooks().empty() || !accumulator.pre_hooks().empty() ||
         !accumulator.post_hooks().empty() || accumulator.tensor_post_acc_grad_hooks() != nullptr;
}

// Whether the backward under way is going to add to a leaf's .grad nothing but what one edge brings, and nobody
// watches it do so. `edges`: how many lead there as far as the caller knows, all but one of them never again.
inline bool accumulates_alone(const at::Tensor& tensor, int64_t edges) {
  if (!tensor.requires_grad() || !tensor.is_leaf()) {
    return false;
  }
  const auto accumulator = torch::autograd::impl::try_get_grad_accumulator(tensor);
  // A leaf knows its accumulator weakly: whoever leads there or holds on to it, such as a second use of the leaf or
  // a reducer of distributed training, counts. So does this pointer.
  if (!accumulator || static_cast<int64_t>(accumulator.use_count()) != edges + 1 || has_hooks(*accumulator)) {
    return false;
  }
  const at::Tensor& grad = tensor.grad();
  if (grad.defined() && (grad.layout() != at::kStrided || grad.scalar_type() != tensor.scalar_type() ||
                         grad.device() != tensor.device() || grad.requires_grad())) {
    return false;
  }
  const auto* chosen = torch::autograd::get_current_graph_task_exec_info();
  if (chosen == nullptr) {
    return false;
  }
  if (chosen->empty()) {  // all leaves
    return true;
  }
  const auto entry = chosen->find(&*accumulator);
  return entry != chosen->end() && entry->second.needed_ && entry->second.captures_ == nullptr;
}

// Whether other tensors look into a tensor's memory, or Python holds its storage.
inline bool shares_storage(const py::handle& object) {
  return tensor_of(object).storage().use_count() > 1;
}

// Leaves this thread's requests to the stock allocator while it lasts.
class Interruption {
 public:
  Interruption() : region_(current_region) {
    if (region_ != nullptr) {
      region_->cursor.interrupt();
    }
  }
  ~Interruption() {
    if (region_ != nullptr) {
      region_->cursor.resume();
    }
  }
  Interruption(const Interruption&) = delete;
  Interruption& operator=(const Interruption&) = delete;

 private:
  Region* region_;
};

// `owned`: the gradient's memory is no one else's, so that it may become .grad itself.
inline void accumulate(const at::Tensor& leaf, const at::Tensor& gradient, bool owned) {
  if (owned && !leaf.grad().defined() && torch::autograd::utils::obeys_layout_contract(gradient, leaf)) {
    leaf.mutable_grad() = gradient.detach();
    return;
  }
  const auto accumulator = torch::autograd::impl::try_get_grad_accumulator(leaf);
  if (!accumulator) {
    throw std::runtime_error("no backward leads to this tensor");
  }
  const Interruption outside_of_the_buffer;  // as what becomes .grad must not lie in it
  (*accumulator)({gradient});
}

}  // namespace olla_fx
