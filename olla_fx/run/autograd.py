"""Forward and backward of a planned graph inside the caller's own loop, as one autograd node.

AOTAutograd's way: one graph for both, run in two phases. Between them the buffer is *busy*: it holds the
activations that backward needs. It is given back when backward has run, or when the caller drops the
graph. Outputs and gradients are allocated outside, since autograd hands them on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from olla_fx import torch_compat
from olla_fx.capture import CapturedStep, StepInput
from olla_fx.errors import BackwardError
from olla_fx.run.copies import copies_of
from olla_fx.run.executor import Run
from olla_fx.run.repetition import Repetition


class Pass:
    """One forward, and the backward that may follow.

    Attributes:
        differentiable_outputs: for each output, whether a tangent comes back for it.
        wanted: indices of the placeholders that want a gradient.
    """

    def __init__(
        self, captured: CapturedStep, run: Run, values: Sequence[Any], repetition: Repetition | None = None
    ) -> None:
        """Prepare a pass.

        Args:
            captured: what runs.
            run: the run that it takes part in.
            values: of all placeholders before the tangents.
            repetition: repeats it where a tangent has another layout than planned; None once that is known.
        """
        self._captured = captured
        self.differentiable_outputs = captured.differentiable
        self._run: Run | None = run
        self._values: list[Any] = list(values)
        self._arguments = self._values
        self._repetition = repetition
        self._kept: list[Any] = []
        self._versions: list[tuple[torch.Tensor, int, StepInput | None]] = []
        self.wanted = captured.wanted

    def differentiable(self) -> list[torch.Tensor]:
        """The tensors that want a gradient, until backward has run."""
        self._running()
        return [self._values[index] for index in self.wanted]

    def forward(self) -> list[torch.Tensor]:
        """The outputs; each a tensor of its own, so that autograd's mark on it makes no cycle."""
        run = self._running()
        tangents = [None] * (len(self._captured.inputs) - len(self._values))
        answer, kept = run.run_phase(0, [*self._values, *tangents], last=False)
        self._kept = list(kept)
        results = [each.detach() for each in answer]
        # Also an update in place whose result backward reads lies in the caller's memory.
        tensors = [each for each in self._kept if isinstance(each, torch.Tensor)]
        kept_storages = set(torch_compat.storage_keys(tensors))
        self._versions = [
            (each, each._version, None) for each in answer if torch_compat.storage_key(each) in kept_storages
        ]
        written = tuple(self._captured.written)
        storages = torch_compat.storage_keys([self._values[index] for index in written])
        read = run.read_by(1).union(
            index for index, storage in zip(written, storages, strict=True) if storage in kept_storages
        )
        inputs, values = self._captured.inputs, self._values
        self._versions += [
            (values[index], values[index]._version, inputs[index])
            for index in sorted(read)
            if index < len(values)
        ]
        return results

    def backward(self, tangents: Sequence[torch.Tensor | None], *, again: bool) -> list[torch.Tensor | None]:
        """The gradients of :meth:`differentiable`.

        Args:
            tangents: of the outputs that have a gradient; None for those that were not used.
            again: whether another backward may follow (``retain_graph=True``).
        """
        run = self._running()
        for tensor, version, source in self._versions:
            if tensor._version != version:
                self.drop()
                name = "an output" if source is None else f"{source.role} {source.name}"
                raise BackwardError(
                    f"{name} was changed in place after the forward, and backward needs it as it was: "
                    "change a clone, or after backward"
                )
        try:
            tangents = [None if each is None else _resolved(each) for each in tangents]
            run = self._repeated(tangents, run, again=again)
            kept = copies_of(self._kept) if again else self._kept
            fitting = [self._fitting(index, tangent) for index, tangent in enumerate(tangents)]
            gradients = run.run_phase(1, [*self._arguments, *fitting, kept], last=not again)
        except BaseException:
            self.drop()
            raise
        if not again:
            self.drop()
        by_index = self._separated(tangents, gradients)
        return [by_index.get(index) for index in self.wanted]

    def _repeated(self, tangents: Sequence[torch.Tensor | None], run: Run, *, again: bool) -> Run:
        """The run whose backward takes tangents of these layouts: this one, or one with forward run again."""
        repetition = self._repetition
        if not again:
            self._repetition = None
        if repetition is None:
            return run
        planned = self._captured.tangent_strides
        strides = tuple(
            stride if tangent is None else tangent.stride()
            for tangent, stride in zip(tangents, planned, strict=True)
        )
        plan = repetition.plan_for(strides)
        if plan is None:
            return run
        self._versions = [each for each in self._versions if each[2] is not None]
        self._kept, self._run = [], None
        run.release()
        self._captured = plan.captured
        run, self._arguments, self._kept = repetition.forward(plan)
        self._run = run
        return run

    def _separated(
        self, tangents: Sequence[torch.Tensor | None], gradients: Sequence[torch.Tensor]
    ) -> dict[int, torch.Tensor]:
        """Gradients by placeholder: those that eager makes, no two in one storage.

        Autograd may keep what it is given and add to it.
        """
        used = {index for index, tangent in enumerate(tangents) if tangent is not None}
        seen = set(torch_compat.storage_keys([each for each in tangents if each is not None]))
        found: dict[int, torch.Tensor] = {}
        storages = torch_compat.storage_keys(gradients)
        reached = self._captured.gradient_tangents
        wanted = zip(self._captured.gradients, reached, gradients, storages, strict=True)
        for index, reached_by, gradient, storage in wanted:
            if reached_by and reached_by.isdisjoint(used):
                continue  # eager makes no gradient from outputs that nobody used
            found[index] = gradient.clone() if storage in seen else gradient
            seen.add(storage)
        return found

    def drop(self) -> None:
        """Forget what backward would need."""
        run, self._run = self._run, None
        self._kept, self._values, self._arguments, self._versions = [], [], [], []
        self._repetition = None
        if run is not None:
            run.release()

    def _running(self) -> Run:
        if self._run is None:
            raise BackwardError(
                "backward was called a second time on one forward, whose activations are gone. All outputs "
                "of a forward share one backward: add their losses up and call it once, or pass "
                "retain_graph=True to the first call"
            )
        return self._run

    def _fitting(self, index: int, tangent: torch.Tensor | None) -> torch.Tensor:
        """A tangent in the layout that was captured; autograd makes expanded ones."""
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
        if spec.overlaps_itself:
            raise BackwardError(
                "a gradient comes in another memory layout than at the backward before, and forward cannot "
                "be repeated for it, because the model or what forward has read was changed since: change a "
                "clone, or after backward"
            )
        return spec.empty(meta_as=tangent.device).copy_(tangent)


def _resolved(tangent: torch.Tensor) -> torch.Tensor:
    """A tangent that kernels can read: dense, and neither to be conjugated nor negated."""
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


class PlannedFunction(torch.autograd.Function):
    """The autograd node of a pass."""

    @staticmethod
    def forward(ctx: Any, running: Pass, *_: torch.Tensor) -> Any:
        """Run forward; the tensors are passed so that autograd knows them."""
        outputs = running.forward()
        ctx.running = running
        ctx.set_materialize_grads(False)
        without = [each for each, has in zip(outputs, running.differentiable_outputs, strict=True) if not has]
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
        wanted = [each for each, has in zip(tangents, has_tangent, strict=True) if has]
        sources = [each for each in wanted if each is not None]
        if torch.is_grad_enabled():  # create_graph=True
            sources += ctx.running.differentiable()
        with torch.no_grad():
            gradients = ctx.running.backward(wanted, again=torch_compat.graph_is_kept())
        if torch.is_grad_enabled():
            gradients = _marked(gradients, sources)
        return (None, *gradients)


class _LastGradients(torch.autograd.Function):
    """Hands gradients on that cannot be differentiated, and says so to whoever tries."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: torch.Tensor) -> Any:
        """Mark the last ``count`` tensors, gradients; autograd follows them to those before."""
        return tuple(each.detach() for each in tensors[len(tensors) - count :])

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
    """The gradients as tensors that autograd follows to what they depend on, up to the refusal.

    To all of it: ``torch.autograd.grad`` takes what no path leads to for a constant.
    """
    there = [each for each in gradients if each is not None]
    marked = iter(_LastGradients.apply(len(there), *sources, *there))  # type: ignore[no-untyped-call]
    return [None if each is None else next(marked) for each in gradients]
