"""Copies a model and its loss to trace them, so that tracing cannot touch the user's.

Modules and their Python attributes are copied, tensors are not. After tracing, the copies' attributes and
the global variables that the user's functions read are compared with what they were: a forward that counts
its calls or keeps a tensor for the next one would run that code once, while capturing, and never again, so
it is refused.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Mapping, Sequence, Set
from typing import Any

import torch
from torch import nn

from olla_fx import torch_compat
from olla_fx.capture.object_reads import ObjectReads
from olla_fx.capture.types import StepRequest
from olla_fx.errors import CaptureError
from olla_fx.guards import MODULE_TABLES, Mode, Role, TensorSlot, other_libraries, plain_values
from olla_fx.guards.reads import function_called, function_values, holders, user_methods
from olla_fx.guards.snapshot import leaves_within, snapshot_of
from olla_fx.guards.writes import Place

_NOT_COMPARED = (MODULE_TABLES - {"training"}) | other_libraries.HARMLESS_ATTRIBUTES


class ModelCopy:
    """A copy of a model and its loss into which other tensors can be put.

    Attributes:
        model: the copy of the model.
        loss_fn: the copy of the loss: of a module or any other object; a function is itself.
        modules: the copies of all modules by name.
        objects: notes what is read from objects that are no modules.
    """

    def __init__(self, request: StepRequest, slots: Sequence[Sequence[TensorSlot]]) -> None:
        """Copy the modules of a request.

        Args:
            request: the user's model and loss; not changed.
            slots: their tensors, from :func:`~olla_fx.capture.inputs.tensor_slots`.

        Raises:
            CaptureError: if it has hooks, TorchScript has compiled some of it, or it cannot be copied.
        """
        originals = request.modules()
        _refuse_scripts(originals)
        _refuse_hooks(originals, gradients_are_made=request.mode is not Mode.TRAINING)
        kept = [slot.table(originals[slot.owner])[slot.key] for places in slots for slot in places]
        for module in originals.values():
            kept += [leaf for _, leaf in leaves_within(module.__dict__) if isinstance(leaf, torch.Tensor)]
        called = [function_called(request.loss_fn), *_forwards(originals)]
        variables = [value for function in called for value in function_values(function).values()]
        self.objects = ObjectReads(
            request.loss_fn, *variables, *(module.__dict__ for module in originals.values())
        )
        self.objects.know(variables)
        name = type(request.model).__name__
        memo = {id(tensor): tensor for tensor in kept}
        try:
            self.model, *_ = copy.deepcopy([request.model, *originals.values()], memo)
            self.modules = {name: memo.get(id(module), module) for name, module in originals.items()}
            memo |= self._stand_ins(request, memo)
            self.loss_fn = self.objects.copied(request.loss_fn, memo)
        except Exception as error:
            raise CaptureError(
                f"{name} or its loss cannot be copied for capturing ({error}): keep tensors as parameters "
                "or buffers, and what cannot be copied outside"
            ) from error
        request.writes.make(self.modules)
        for module in self.modules.values():
            other_libraries.silence(module)
        self._slots = slots
        self._put: list[tuple[torch.Tensor, int]] = []

    @staticmethod
    def _stand_ins(request: StepRequest, copies: Mapping[int, Any]) -> dict[int, nn.Module]:
        """Return what stands in the copies for planned modules in reach of the loss: the copied models."""
        tables = {
            id(torch_compat.children_of(module)): copies.get(id(module), module)
            for module in request.modules().values()
        }
        leaves = [leaf for _, leaf in leaves_within(request.loss_fn, fields=request.fields)]
        modules = [leaf for leaf in leaves if isinstance(leaf, nn.Module) and id(leaf) not in copies]
        planned = {id(module): tables.get(id(torch_compat.children_of(module))) for module in modules}
        return {identity: module for identity, module in planned.items() if module is not None}

    def put(self, tensors: Sequence[torch.Tensor]) -> None:
        """Replace every tensor, tied places together; one tensor for each entry of the slots."""
        self._put = [(tensor, torch_compat.storage_key(tensor)) for tensor in tensors]
        for places, tensor in zip(self._slots, tensors, strict=True):
            for slot in places:
                slot.table(self.modules[slot.owner])[slot.key] = tensor
        for module in self.modules.values():
            if isinstance(module, nn.RNNBase):
                torch_compat.refresh_weight_list(module)

    def attributes(self) -> dict[str, object]:
        """Return snapshots, by name, of the copies' Python attributes and loose tensors.

        Beside them are values that the user's functions read, tensors that were put in and are no longer
        there or have another memory, and parameters and buffers that are new.
        """
        known = {(slot.owner, slot.key) for places in self._slots for slot in places}
        snapshots: dict[str, object] = {}
        for owner, module in self.modules.items():
            hooked = bool(torch_compat.module_hooks(module))
            for key, value in module.__dict__.items():
                if key in _NOT_COMPARED or (owner, key) in known:
                    continue
                if isinstance(value, torch.Tensor) and hooked:
                    continue  # weight_norm and spectral_norm recompute it in their hook at every call
                snapshots[f"{owner}.{key}".lstrip(".")] = snapshot_of(value, versions=True)
        roots: list[tuple[str, object]] = [("loss_fn", self.loss_fn)]
        roots += [("loss_fn", function_called(self.loss_fn))]
        roots += [(forward.__qualname__, forward) for forward in _forwards(self.modules)]
        for label, root in roots:
            for key, value in (function_values(root) or {"itself": root}).items():
                snapshot = snapshot_of(value, versions=True, fields=self.objects.opaque)
                snapshots[f"{label}: {key}"] = snapshot
        return snapshots | self._replaced_tensors(known)

    def plain_values(self) -> dict[Place, object]:
        """Return the plain Python values in reach of the copies' attributes."""
        return plain_values(self.modules, _NOT_COMPARED)

    def _replaced_tensors(self, known: Set[tuple[str, str]]) -> dict[str, object]:
        """Return tensors that traced code assigned instead of writing into them: eager would keep them."""
        replaced: dict[str, object] = {}
        for places, (tensor, storage) in zip(self._slots, self._put, strict=False):
            for slot in places:
                module = self.modules[slot.owner]
                if slot.role is Role.ATTRIBUTE and torch_compat.module_hooks(module):
                    continue  # weight_norm and spectral_norm recompute it in their hook at every call
                present = slot.table(module).get(slot.key)
                if present is not tensor or torch_compat.storage_key(present) != storage:
                    replaced[f"{slot.owner}.{slot.key}".lstrip(".")] = "replaced"
        for owner, module in self.modules.items():
            for key, _ in torch_compat.own_tensors(module):
                if (owner, key) not in known:
                    replaced[f"{owner}.{key}".lstrip(".")] = "new"
        return replaced


def _forwards(modules: Mapping[str, nn.Module]) -> list[types.FunctionType]:
    """Return the functions of the user's code that modules run."""
    return user_methods((holder, "forward") for module in modules.values() for holder in holders(module))


def refuse_side_effects(before: Mapping[str, object], after: Mapping[str, object]) -> None:
    """Refuse a model or a loss that changed its own attributes.

    Raises:
        CaptureError: naming the attribute.
    """
    changed = sorted(
        name for name in {*before, *after} if before.get(name, "absent") != after.get(name, "absent")
    )
    if changed:
        raise CaptureError(
            f"the model's forward or its loss changes its attribute {changed[0]!r}; a captured step would "
            "not repeat that. Keep such state in a registered buffer and write into it (copy_, mul_) instead "
            "of assigning a new tensor, or keep it outside"
        )


def _refuse_hooks(modules: Mapping[str, nn.Module], *, gradients_are_made: bool) -> None:
    for name, module in modules.items():
        for hook in torch_compat.module_hooks(module):
            owner: Any = getattr(hook, "__module__", None) or type(hook).__module__
            if not str(owner).startswith(other_libraries.HARMLESS_HOOKS):
                raise CaptureError(
                    f"module {name or type(module).__name__!r} has the hook "
                    f"{getattr(hook, '__qualname__', hook)!r}: it would run once, while capturing, and in no "
                    "step. Remove it, or put its work into the module's forward"
                )
        for key, parameter in torch_compat.parameters_of(module).items():
            if gradients_are_made:
                break  # autograd runs such hooks on the gradients that it is handed
            if parameter is not None and torch_compat.tensor_hooks(parameter):
                raise CaptureError(
                    f"parameter {f'{name}.{key}'.lstrip('.')!r} has gradient hooks: a captured step makes no "
                    ".grad for them to see. Remove them"
                )


def _refuse_scripts(originals: Mapping[str, nn.Module]) -> None:
    """Refuse modules of TorchScript, which keeps their tensors in C++, where they cannot be replaced."""
    for name, module in originals.items():
        if isinstance(module, torch.jit.ScriptModule):
            raise CaptureError(
                f"module {name or type(module).__name__!r} was compiled by TorchScript, whose parameters "
                "cannot be followed: use the Python module that torch.jit.script or torch.jit.trace was given"
            )
