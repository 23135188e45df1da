// Takes the gradients of a planned backward one by one, as its operators make them; see olla_fx/run/gradients.py.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_set>
#include <utility>
#include <vector>

#include <ATen/Tensor.h>
#include <c10/util/intrusive_ptr.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>

#include "accumulation.h"

namespace olla_fx {

namespace py = pybind11;

// Gradients that became .grad in a buffer; a run adds to them as it makes them.
class LeftGradients {
 public:
  void add(const at::Tensor& gradient) {
    const std::lock_guard<std::mutex> guard(mutex_);
    gradients_.emplace_back(gradient.getIntrusivePtr());
  }

  // Whether one of them is alive; forgets those that are gone.
  bool any_alive() {
    const std::lock_guard<std::mutex> guard(mutex_);
    gradients_.erase(std::remove_if(gradients_.begin(), gradients_.end(),
                                    [](const Weak& gradient) { return gradient.expired(); }),
                     gradients_.end());
    return !gradients_.empty();
  }

  py::list alive() const {
    std::vector<Weak> known;
    {
      const std::lock_guard<std::mutex> guard(mutex_);
      known = gradients_;
    }
    return alive_among(known);
  }

  // Those that are alive, which are forgotten.
  py::list take() {
    std::vector<Weak> taken;
    {
      const std::lock_guard<std::mutex> guard(mutex_);
      taken = std::exchange(gradients_, {});
    }
    return alive_among(taken);
  }

  void put_back(const py::handle& gradient) {
    add(tensor_of(gradient));
  }

 private:
  using Weak = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

  static py::list alive_among(const std::vector<Weak>& gradients) {
    py::list alive;
    for (const Weak& gradient : gradients) {
      if (auto locked = gradient.lock()) {
        alive.append(py::reinterpret_steal<py::object>(THPVariable_Wrap(at::Tensor(std::move(locked)))));
      }
    }
    return alive;
  }

  mutable std::mutex mutex_;
  std::vector<Weak> gradients_;
};

// The gradients of one backward, by their position among those of the step.
class Gradients {
 public:
  // `kept`, `added`: those that the plan has in the buffer; see GradientsInBuffer.
  Gradients(const py::iterable& leaves, const py::iterable& kept, const py::iterable& added) {
    for (const py::handle leaf : leaves) {
      gradients_.push_back({tensor_of(leaf)});
    }
    for (const py::handle position : kept) {
      of(position.cast<int64_t>()).is_kept = true;
    }
    for (const py::handle position : added) {
      of(position.cast<int64_t>()).is_added = true;
    }
  }

  // Those that eager would not make are not taken.
  void leave_out(const std::vector<int64_t>& positions) {
    for (const int64_t position : positions) {
      of(position).is_absent = true;
    }
  }

  // Adds to .grad at once what autograd would add alone, with no hook that sees it. `edges`: how many lead to each
  // leaf as far as is known; one where there are none.
  void accumulate_directly(const std::vector<int64_t>& edges) {
    for (size_t position = 0; position < gradients_.size(); ++position) {
      Gradient& gradient = gradients_[position];
      gradient.is_direct = accumulates_alone(gradient.leaf, edges.empty() ? 1 : edges[position]);
    }
  }

  // Cuts the edges from the node whose backward is under way to the leaves if nothing comes over any of them, now
  // or later: the engine would visit every leaf with nothing. False if they stay.
  bool cut_edges() const {
    const auto node = torch::autograd::get_current_node();
    if (!node) {
      return false;
    }
    std::unordered_set<const torch::autograd::Node*> idle;
    for (const Gradient& gradient : gradients_) {
      if (gradient.is_direct) {
        idle.insert(torch::autograd::impl::try_get_grad_accumulator(gradient.leaf).get());
      }
    }
    auto& edges = const_cast<torch::autograd::edge_list&>(node->next_edges());
    for (const torch::autograd::Edge& edge : edges) {
      if (edge.is_valid() && idle.count(edge.function.get()) == 0) {
        return false;
      }
    }
    std::fill(edges.begin(), edges.end(), torch::autograd::Edge());
    return true;
  }

  // The positions of those that a plan for such a backward keeps and adds, before it runs; none if they are those
  // of this plan.
  py::object suited() const {
    std::vector<int64_t> kept, added;
    bool is_as_planned = true;
    for (size_t position = 0; position < gradients_.size(); ++position) {
      const Gradient& gradient = gradients_[position];
      const bool is_kept = gradient.is_direct && !gradient.is_absent && !gradient.leaf.grad().defined();
      const bool is_added = gradient.is_direct && !is_kept;
      is_as_planned &= is_kept == gradient.is_kept && is_added == gradient.is_added;
      if (gradient.is_direct) {
        (is_kept ? kept : added).push_back(static_cast<int64_t>(position));
      }
    }
    return is_as_planned ? py::object(py::none()) : py::object(py::make_tuple(kept, added));
  }

  // `is_made_here`: false for a tensor of the caller's, or what forward has saved.
  void take(int64_t position, at::Tensor gradient, bool is_made_here) {
    Gradient& taken = of(position);
    if (taken.is_absent) {
      return;
    }
    // Autograd may keep what it is given and add to it.
    const bool is_own = is_made_here && !taken.is_added && !has_storage_of(gradient);
    if (taken.is_direct) {
      const bool becomes_grad = is_own && !taken.leaf.grad().defined();
      accumulate(taken.leaf, gradient, is_own);
      if (becomes_grad) {
        storages_.insert(storage_of(gradient));
        if (taken.is_kept) {
          left->add(taken.leaf.grad());
        }
      }
      return;
    }
    if (!is_own || taken.is_kept) {
      const Interruption outside_of_the_buffer;
      gradient = gradient.clone();
    }
    storages_.insert(storage_of(gradient));
    taken.for_autograd = std::move(gradient);
  }

  // What autograd is to be given; None for what is in .grad, or was not made.
  py::list for_autograd() const {
    py::list handed;
    for (const Gradient& gradient : gradients_) {
      handed.append(gradient.for_autograd.defined()
                        ? py::reinterpret_steal<py::object>(THPVariable_Wrap(gradient.for_autograd))
                        : py::object(py::none()));
    }
    return handed;
  }

  std::shared_ptr<LeftGradients> left = std::make_shared<LeftGradients>();

 private:
  struct Gradient {
    at::Tensor leaf;
    at::Tensor for_autograd = {};
    bool is_direct = false;
    bool is_absent = false;
    bool is_kept = false;
    bool is_added = false;
  };

  Gradient& of(int64_t position) {
    return gradients_.at(static_cast<size_t>(position));
  }

  static const c10::StorageImpl* storage_of(const at::Tensor& tensor) {
    return tensor.storage().unsafeGetStorageImpl();
  }

  bool has_storage_of(const at::Tensor& gradient) const {
    return storages_.count(storage_of(gradient)) != 0;
  }

  std::vector<Gradient> gradients_;
  std::unordered_set<const c10::StorageImpl*> storages_;  // which .grad or autograd has
};

}  // namespace olla_fx
