"""Refuses models that a captured step could not repeat faithfully, with the cause and the way out."""

from __future__ import annotations

import contextlib
import pickle
import random
import traceback
from collections.abc import Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import numpy as np
import torch
from torch import fx, nn

from olla_fx import torch_compat
from olla_fx.errors import CaptureError
from olla_fx.guards import Role, StepInput

REWRITE = "Rewrite that part with torch.where or fixed shapes"
"""What to do about control flow that depends on data."""


class DependsOnValuesError(CaptureError):
    """Control flow or a shape depends on values that nobody knows before a call."""


def refuse_effects(graph_module: fx.GraphModule, expected: int) -> None:
    """Refuse operators that functionalisation keeps in order by tokens: prints, checks that raise."""
    for node in graph_module.graph.nodes:
        if node.kwargs.get("generator") is not None:
            raise CaptureError(
                f"the model hands a torch.Generator of its own to {node.target}, which no captured step can "
                "advance: draw with the default generator, seeded outside by torch.manual_seed"
            )
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    if len(placeholders) != expected:
        effects = [
            str(node.args[1]) for node in graph_module.graph.nodes if "with_effects" in str(node.target)
        ]
        raise CaptureError(
            f"the model calls {effects[0] if effects else 'an operator with side effects'}, whose side "
            "effect (raising on bad data, say) a captured step cannot keep; move that part out of the model"
        )


def refuse_new_layouts(
    inputs: Sequence[StepInput], before: Sequence[Hashable], after: Sequence[Hashable]
) -> None:
    """Refuse a step that changes the shape or the memory of a tensor that it is given.

    Args:
        inputs: what the tensors are.
        before: their layouts (:func:`olla_fx.torch_compat.layout_in_trace`) when the step began.
        after: when it ended.
    """
    for item, old, new in zip(inputs, before, after, strict=True):
        if old != new:
            name = f"input {item.name}" if item.role is Role.EXAMPLE else f"{item.role.value} {item.name!r}"
            raise CaptureError(
                f"the step gives {name} another shape or other memory (t_, resize_, set_, .data), which a "
                "captured step would not repeat: make a new view of it (y = x.t() instead of x.t_()), or "
                "write into it (copy_, mul_)"
            )


_ONE_TYPE = frozenset(
    getattr(torch.ops.aten, name).default
    for name in ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "convolution")
)
"""Operators whose kernels want one element type, which their fake tensors do not check."""

_NORMS = frozenset((torch.ops.aten.native_layer_norm.default, torch.ops.aten.native_group_norm.default))
_CLASS_LOSSES = frozenset(
    (torch.ops.aten.nll_loss_forward.default, torch.ops.aten.nll_loss2d_forward.default)
)


def refuse_mixed_types(graph_module: fx.GraphModule, model: nn.Module) -> None:
    """Refuse products of different element types, as of an example of another type than the weights."""
    for node in graph_module.graph.nodes:
        types = _refused_types(node)
        if types:
            raise CaptureError(
                f"{type(model).__name__} (or its loss) rejects the example input: {node.target} gets "
                f"{' and '.join(sorted(str(dtype).removeprefix('torch.') for dtype in types))}; convert the "
                "input or the model to one type, and class targets to int64"
            )


def _refused_types(node: fx.Node) -> set[torch.dtype]:
    """Return the element types that an operator's kernel would refuse; none if it takes them."""
    if node.target in _CLASS_LOSSES:
        return {node.all_input_nodes[1].meta["val"].dtype} - {torch.int64, torch.uint8}
    if node.target not in _ONE_TYPE | _NORMS:
        return set()
    values = (argument.meta["val"] for argument in node.all_input_nodes)
    types = {value.dtype for value in values if isinstance(value, torch.Tensor)}  # sizes may be nodes, too
    # Norms of short floats may keep their weights in float32.
    is_supported = node.target in _NORMS and torch.float64 not in types and types - {torch.float32} != types
    return types if len(types) > 1 and not is_supported else set()


def refuse_unwritable(graph_module: fx.GraphModule, model: nn.Module) -> None:
    """Refuse an operator whose overload has the name of a Python keyword: no code can be written with it."""
    for node in graph_module.graph.nodes:
        if node.target in _UNWRITABLE:
            raise CaptureError(
                f"{type(model).__name__} calls random_ with two bounds, an operator whose name torch.fx "
                "cannot write: use torch.randint or torch.randint_like, which draw the same numbers"
            )


_UNWRITABLE = frozenset({getattr(torch.ops.aten.random, "from"), getattr(torch.ops.aten.random_, "from")})


def refuse_baked_tensors(graph_module: fx.GraphModule, modules: Mapping[str, nn.Module]) -> None:
    """Refuse a step that reads its own parameters or buffers other than as attributes of modules."""
    names = {
        torch_compat.storage_key(tensor): f"{owner}.{key}".lstrip(".")
        for owner, module in modules.items()
        for key, tensor in torch_compat.own_tensors(module)
    }
    for node in graph_module.graph.find_nodes(op="get_attr"):
        constant = getattr(graph_module, str(node.target), None)
        name = names.get(torch_compat.storage_key(constant)) if isinstance(constant, torch.Tensor) else None
        if name is not None:
            raise CaptureError(
                f"the step reads {name} from a Python container or a function's closure, where it would not "
                "be trained: read it as an attribute of a module, or use nn.ParameterList or "
                "nn.ParameterDict; make a loss that needs the model's weights an nn.Module that holds them"
            )


@contextlib.contextmanager
def no_python_randomness() -> Iterator[None]:
    """Refuse a model that draws from Python's or NumPy's generator: one draw would serve all steps.

    Both generators are put back. Seeding torch's is refused, too: it would happen while capturing alone.
    """
    python, legacy = random.getstate(), np.random.get_state()
    try:
        with torch_compat.seeding_replaced(_refuse_seeding):
            yield
        has_drawn = random.getstate() != python or pickle.dumps(np.random.get_state()) != pickle.dumps(legacy)
    finally:
        random.setstate(python)
        np.random.set_state(legacy)
    if has_drawn:
        raise CaptureError(
            "the model draws random numbers from Python's random or numpy.random, which a captured step "
            "would draw once for all steps; draw them with torch"
        )


def _refuse_seeding(*_: object, **__: object) -> NoReturn:
    raise CaptureError(
        "the model or its loss seeds torch's random numbers (torch.manual_seed or torch.seed), which a "
        "captured step would not repeat; seed outside, before the call"
    )


@contextlib.contextmanager
def explained(model: nn.Module) -> Iterator[None]:
    """Turn errors of tracing into one that names the model and the way out."""
    name = type(model).__name__
    try:
        with torch_compat.quiet_fake_tensors():
            yield
    except CaptureError:
        raise
    except torch_compat.DATA_DEPENDENT_ERRORS as error:
        _refuse_packed_sequences(name, error)
        averaging = [
            path
            for path, module in model.named_modules()
            if isinstance(module, torch_compat.NORM_TYPE)
            and module.momentum is None
            and module.track_running_stats
        ]
        if averaging and model.training:
            raise CaptureError(
                f"{averaging[0] or name} has momentum=None: its averages depend on the number of batches so "
                "far, which a captured step would bake. Give it a number as momentum; update_bn of "
                "torch.optim.swa_utils works on an AveragedModel of the model, not of a planned one"
            ) from error
        raise DependsOnValuesError(
            f"{name} has control flow or shapes that depend on the values of its tensors, and these not on "
            f"its inputs alone, so no one graph describes its step{_where(error)}. {_advice(error)}"
        ) from error
    except Exception as error:
        if isinstance(error, AssertionError) and "functional graph" in str(error):
            raise CaptureError(
                f"{name} writes to a tensor that is no parameter, buffer or attribute of a module (one in a "
                "list or dict, say): register it with register_buffer"
            ) from error
        _refuse_packed_sequences(name, error)
        if "Attempted to set the storage" in str(error):
            raise CaptureError(
                f"{name} gives a tensor another size or storage (resize_, set_){_where(error)}, as "
                "nn.CrossMapLRN2d does, which capturing cannot follow: make tensors in their final shape; "
                "nn.LocalResponseNorm does"
            ) from error
        recurrent = [path for path, module in model.named_modules() if isinstance(module, nn.RNNBase)]
        if recurrent and "data pointer" in str(error):
            raise CaptureError(
                f"{recurrent[0] or name} is a recurrent layer, and cuDNN looks for its weights in memory, "
                "which capturing has not: plan and call it within torch.backends.cudnn.flags(enabled=False), "
                "by which PyTorch's own kernels run it"
            ) from error
        raise CaptureError(
            f"{name} (or its loss) rejects the example input{_where(error)}: {type(error).__name__}: "
            f"{_first_line(error)}. Call the model and its loss on it in eager to see why"
        ) from error


def _refuse_packed_sequences(name: str, error: Exception) -> None:
    if any(frame.name == "pack_padded_sequence" for frame in traceback.extract_tb(error.__traceback__)):
        raise CaptureError(
            f"{name} packs sequences{_where(error)}: pack_padded_sequence and the layers that take its "
            "results read lengths in C++, where nobody can answer. Hand the layers padded sequences and mask "
            "or gather their outputs, or run them in eager"
        ) from error


def _advice(error: Exception) -> str:
    """Return advice about control flow that depends on data."""
    if any(frame.name == "_detect_is_causal_mask" for frame in traceback.extract_tb(error.__traceback__)):
        return (
            "nn.TransformerEncoder and nn.TransformerDecoder look whether a mask is causal unless they are "
            "told: pass is_causal (of a decoder tgt_is_causal and memory_is_causal) as True or False"
        )
    return REWRITE


def _where(error: Exception) -> str:
    """Return the innermost line, neither torch's nor ours, that raised an error; empty without one."""
    own_folders = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith((*own_folders, "<")):
            path = "/".join(Path(frame.filename).parts[-2:])
            return f" ({path}, line {frame.lineno}: {frame.line})"
    return ""


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0].rstrip(".") if text else type(error).__name__
