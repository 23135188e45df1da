"""Forward and backward of a planned graph inside the caller's own loop, as one autograd node.

AOTAutograd's way: one graph for both, run in two phases. Between them the buffer is *busy*: it holds the
activations that backward needs. It is given back when backward has run, or when the caller drops the
graph. Outputs are allocated outside, since autograd hands them on.

The graph is planned for gradients ("tangents") in certain memory layouts. Others are copied into these, as
AOTAutograd does at every backward; here the next forward is planned for what came. The gradients that
backward makes are handed over one by one (:mod:`olla_fx.run.gradients`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from olla_fx import torch_compat
from olla_fx.dataflow import GradientsInBuffer
from olla_fx.errors import BackwardError
from olla_fx.run.copies import copies_of
from olla_fx.run.gradients import GradientEdges, Gradients
from olla_fx.run.plan_cache import Strides
from olla_fx.run.planned_run import PlannedRun

NoteBackward = Callable[[Strides, GradientsInBuffer], None]
"""Told by a backward the tangents' element strides, and which gradients could have been in the buffer."""


class Pass:
    """One forward, and the backward that may follow.

    Attributes:
        differentiable_outputs: for each output, True if a tangent comes back for it.
        wanted: indices of the placeholders that want a gradient.
    """

    def __init__(self, run: PlannedRun, values: Sequence[Any], note_backward: NoteBackward) -> None:
        """Prepare a pass.

        Args:
            run: the run that it takes part in.
            values: of all placeholders before the tangents.
            note_backward: told what a backward has shown for the next forward's plan.
        """
        self._captured = run.step.captured
        self.differentiable_outputs = self._captured.differentiable
        self._run: PlannedRun | None = run
        self._values = values
        self._note_backward = note_backward
        self._kept: Any = []
        self._watched = _NOTHING_WATCHED
        self._is_repeated = False
        self.wanted = self._captured.wanted
        self._edges = GradientEdges(self.differentiable())

    def differentiable(self) -> list[torch.Tensor]:
        """Return the tensors that want a gradient, until backward has run."""
        self._running()
        return [self._values[index] for index in self.wanted]

    def forward(self) -> list[torch.Tensor]:
        """Return the outputs; each a tensor of its own, so that autograd's mark on it makes no cycle."""
        run = self._running()
        tangents = [None] * (len(self._captured.inputs) - len(self._values))
        answer, kept = run.run_phase(0, [*self._values, *tangents], last=False)
        self._kept = kept
        handover = run.step.emitted.handover
        self._watched = _Watched(
            [
                *(answer[index] for index in handover.outputs_kept),
                *(self._values[index] for index in handover.placeholders_read),
            ]
        )
        return [output.detach() for output in answer]

    def _refuse_changes(self) -> None:
        """Refuse a backward if a tensor that it reads, and that the caller can reach, was changed."""
        changed = self._watched.changed()
        if changed is None:
            return
        index, how = changed
        handover = self._running().step.emitted.handover
        index -= len(handover.outputs_kept)
        name = "an output"
        if index >= 0:
            source = self._captured.inputs[handover.placeholders_read[index]]
            name = f"{source.role} {source.name}"
        self.drop()
        raise BackwardError(
            f"{name} was {how} after the forward, and backward needs it as it was: "
            "change a clone, or after backward"
        )

    def backward(
        self, tangents: Sequence[torch.Tensor | None], *, again: bool, creates_graph: bool
    ) -> list[torch.Tensor | None]:
        """Return the gradients of :meth:`differentiable`; None for those that are in ``.grad`` already.

        Args:
            tangents: of the outputs that have a gradient; None for those that were not used.
            again: True if another backward may follow (``retain_graph=True``).
            creates_graph: True if gradients are to be differentiated, and so must reach autograd.
        """
        run = self._running()
        self._refuse_changes()
        try:
            tangents = [None if tangent is None else _resolved(tangent) for tangent in tangents]
            kept = self._kept
            if again:
                values = kept if isinstance(kept, list) else kept.values()
                kept = copies_of(values, run.step.emitted.handover.kept_written)
            fitting = [self._fitting(index, tangent) for index, tangent in enumerate(tangents)]
            gradients = Gradients(run.step, self._values, tangents)
            if not creates_graph:
                gradients.accumulate_directly()
            if not self._is_repeated:  # later ones add to what the first has made
                run.gradients = gradients.suited_to_buffer()
            run.leave_gradients(gradients.taken.left)
            run.run_phase(1, [*self._values, *fitting, kept, gradients.taken], last=not again)
        except BaseException:
            self.drop()
            raise
        planned = self._captured.tangent_strides
        strides = tuple(
            stride if tangent is None else tangent.stride()
            for tangent, stride in zip(tangents, planned, strict=True)
        )
        self._note_backward(strides, run.gradients)
        if again:
            # A recomputation may have updated buffers.
            self._watched.refresh()
            self._is_repeated = True
        else:
            if gradients.taken.cut_edges():
                self._edges.forget()
            self.drop()
        return gradients.for_autograd()

    def drop(self) -> None:
        """Forget what backward would need."""
        run, self._run = self._run, None
        self._kept, self._values, self._watched = [], [], _NOTHING_WATCHED
        if run is not None:
            self._edges.end()
            run.release()

    def _running(self) -> PlannedRun:
        if self._run is None:
            raise BackwardError(
                "backward was called a second time on one forward, whose activations are gone. All outputs "
                "of a forward share one backward: add their losses up and call it once, or pass "
                "retain_graph=True to the first call"
            )
        return self._run

    def _fitting(self, index: int, tangent: torch.Tensor | None) -> torch.Tensor:
        """Return a tangent in the layout that was planned."""
        spec = self._captured.inputs[len(self._values) + index].spec
        if spec is None:
            raise ValueError(f"tangent {index} was captured without a kind")
        if tangent is None:
            zeros = spec.empty(meta_as=spec.device)
            # By way of its storage: elements may share a place, which zero_ would refuse.
            zeros.new_empty(0).set_(zeros.untyped_storage()).zero_()
            return zeros
        if spec.fits(tangent):
            return tangent
        if not spec.overlaps_itself:
            return spec.empty(meta_as=tangent.device).copy_(tangent)
        # Planned for one number spread out, as the gradient of a sum is, which has no room for several. Its
        # operators take any layout, but for those that reach into a storage.
        if any(
            "as_strided" in str(node.target) for node in self._running().step.emitted.phases[1].graph.nodes
        ):
            raise BackwardError(
                "a gradient comes in another memory layout than at the backward before, and this model's "
                "backward cannot take it: run the forward and the backward again, which are planned for it"
            )
        return tangent.contiguous()


class _Watched:
    """Tensors, and what of them changes if they are written to or given other memory (``.data = other``)."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tensors
        self.refresh()

    def refresh(self) -> None:
        """Take the present state for granted."""
        self._versions, self._addresses = torch_compat.states_of(self._tensors)

    def changed(self) -> tuple[int, str] | None:
        """Return which tensor was changed first in the list, and how; None if none was."""
        versions, addresses = torch_compat.states_of(self._tensors)
        if versions == self._versions and addresses == self._addresses:
            return None
        for index, version in enumerate(versions):
            if version != self._versions[index]:
                return index, "changed in place"
            if addresses[index] != self._addresses[index]:
                return index, "given other data"
        return None


def _resolved(tangent: torch.Tensor) -> torch.Tensor:
    """Return a tangent that kernels can read: dense, and neither to be conjugated nor negated."""
    if torch_compat.is_batched(tangent):
        raise BackwardError(
            "several backwards at once (is_grads_batched=True, vectorize=True) do not go through a "
            "planned module, whose backward is planned for one: call the model itself there, or one "
            "after another"
        )
    if tangent.layout is not torch.strided:
        raise BackwardError(
            f"the gradient of an output is a {tangent.layout} tensor, and backward is planned for strided "
            "ones: take the operation that makes it with sparse=False"
        )
    return tangent.detach().resolve_conj().resolve_neg()


_NOTHING_WATCHED = _Watched([])


class PlannedFunction(torch.autograd.Function):
    """The autograd node of a pass."""

    @staticmethod
    def forward(ctx: Any, running: Pass, *_: torch.Tensor) -> Any:
        """Run forward; the tensors are passed so that autograd knows them."""
        outputs = running.forward()
        ctx.running = running
        ctx.set_materialize_grads(False)
        pairs = zip(outputs, running.differentiable_outputs, strict=True)
        without = [output for output, has_tangent in pairs if not has_tangent]
        ctx.mark_non_differentiable(*without)
        return tuple(outputs)

    @staticmethod
    @torch_compat.not_compiled  # a compiled function may call backward
    def backward(ctx: Any, *tangents: torch.Tensor | None) -> Any:
        """Run backward; once differentiable, also where no tangent wants a gradient, as that of a sum.

        ``torch.autograd.function.once_differentiable`` marks gradients for tangents that want one alone. A
        penalty on the others would be taken for a constant.
        """
        has_tangent = ctx.running.differentiable_outputs
        wanted = [tangent for tangent, has in zip(tangents, has_tangent, strict=True) if has]
        again = torch_compat.graph_is_kept()
        if not torch.is_grad_enabled():
            return (None, *ctx.running.backward(wanted, again=again, creates_graph=False))
        sources = [tangent for tangent in wanted if tangent is not None] + ctx.running.differentiable()
        with torch.no_grad():
            gradients = ctx.running.backward(wanted, again=again, creates_graph=True)
        return (None, *_marked(gradients, sources))


class _LastGradients(torch.autograd.Function):
    """Hands gradients on that cannot be differentiated, and says so to whoever tries."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: torch.Tensor) -> Any:
        """Mark the last ``count`` tensors, gradients; autograd follows them to those before."""
        return tuple(tensor.detach() for tensor in tensors[len(tensors) - count :])

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor | None) -> Any:
        """Refuse."""
        raise BackwardError(
            "gradients of gradients (double backward, create_graph=True) do not go through a planned module, "
            "whose backward is planned once and has no graph of its own: call the model itself there"
        )


def _marked(
    gradients: Sequence[torch.Tensor | None], sources: Sequence[torch.Tensor]
) -> list[torch.Tensor | None]:
    """Return the gradients as tensors that autograd follows to what they depend on, up to the refusal.

    To all of it: ``torch.autograd.grad`` takes what no path leads to for a constant.
    """
    given = [gradient for gradient in gradients if gradient is not None]
    marked = iter(_LastGradients.apply(len(given), *sources, *given))  # type: ignore[no-untyped-call]
    return [None if gradient is None else next(marked) for gradient in gradients]
