"""The workload as it is run here: one model that goes back to its first state, in any dtype."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from memfit.errors import WorkloadError
from memfit.group import as_number, check_loss, run_group, to_device
from memfit.trial.checks import check_given, check_model
from memfit.verify.worker.examples import map_tensors
from memfit.verify.worker.gradients import Gradient, difference
from memfit.verify.worker.widening import Widening
from memfit.workload import LoadedWorkload, Workload, user_code


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """One optimizer step and what led to it."""

    gradient: Gradient
    parameters: dict[str, torch.Tensor]
    """Trainable parameters after the step; empty where none was made."""
    loss: float
    contributions: tuple[float, ...]
    """What each microbatch that has elements added to the gradient: the norm of what it added to
    the parameter to which it added most."""


class Subject:
    """A workload with its model."""

    def __init__(self, loaded: LoadedWorkload, device: str, seed: int) -> None:
        """Build the workload and its model."""
        self.device = torch.device(device)
        self.info = loaded.info
        self._seed = seed
        self.dtype = torch.float32
        torch.manual_seed(seed)
        with user_code("the workload cannot be built"):
            self.workload: Workload = loaded.make()
            self.workload.device = self.device
            with self.device:
                model = self.workload.model()
        self.model = check_model(model).to(self.device).train()
        self.frozen: frozenset[torch.nn.Module] = frozenset()
        """Modules that are held in eval mode."""
        self.wrapped: Any = None
        """The model wrapped for data parallelism, where it is."""
        self._state = {name: t.detach().clone() for name, t in self._tensors()}
        self._modes = [(m, m.training) for m in model.modules()]

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.model.named_parameters()
        yield from self.model.named_buffers()

    def batch(self, size: int) -> Any:
        """Draw a batch, the same at every call with this size."""
        torch.manual_seed(self._seed + size)
        with user_code(f"batch({size}) failed"):
            batch = to_device(self.workload.batch(size), self.device)
        check_given(batch, size)
        return batch

    def use(self, dtype: torch.dtype) -> None:
        """Let model, default dtype and batches be of this dtype."""
        self.dtype = dtype
        torch.set_default_dtype(dtype)
        self.model.to(dtype)
        self.reset()

    def reset(self) -> None:
        """Bring parameters, buffers, modes and the generator back to where they were."""
        with torch.no_grad():
            for name, tensor in self._tensors():
                tensor.copy_(self._state[name])
        for parameter in self.model.parameters():
            parameter.grad = None
        for module, training in self._modes:
            module.training = training and module not in self.frozen
        torch.manual_seed(self._seed)  # of every device

    def changed_buffers(self) -> dict[str, float]:
        """Return the buffers that are no longer as they were, with the largest change of each."""
        found = {}
        for name, buffer in self.model.named_buffers():
            before = self._state[name]
            if not torch.equal(buffer.to(before.dtype), before):
                found[name] = float((buffer.double() - before.double()).abs().max())
        return found

    def cast(self, batch: Any) -> Any:
        """Return the batch with its floating-point tensors in the model's dtype."""
        return map_tensors(batch, lambda t: t.to(self.dtype) if t.is_floating_point() else t)

    def loss(self, batch: Any) -> torch.Tensor:
        """Compute the workload's loss of a batch, with its graph."""
        value = self.value(batch)
        with user_code("loss() failed"):
            return check_loss(value)

    def value(self, batch: Any) -> torch.Tensor:
        """Compute the workload's loss of a batch; it has no graph where gradients are off."""
        widened: Any = Widening if self.dtype is torch.float64 else contextlib.nullcontext
        with user_code("loss() failed"), widened():
            model = self.model if self.wrapped is None else self.wrapped
            made: torch.Tensor = self.workload.loss(model, self.cast(batch))
        return made

    def counts(self, parts: Sequence[Any], sizes: Sequence[int]) -> list[int]:
        """Return the elements of each microbatch: what `count` says, or its examples."""
        if not self.workload.counts_elements():
            return list(sizes)
        with user_code("count() failed"):
            return [as_number(self.workload.count(part)) for part in parts]

    def optimizer(self) -> Any:
        """Build the workload's optimizer."""
        with user_code("optimizer() failed"):
            made = self.workload.optimizer(self.model)
        if not hasattr(made, "step") or not hasattr(made, "zero_grad"):
            raise WorkloadError(
                f"optimizer() returned {type(made).__name__}, not an optimizer",
                hint="return a torch.optim.Optimizer",
            )
        return made

    def gradient(self) -> Gradient:
        """Return a copy of the gradients that are there."""
        return {
            name: p.grad.detach().clone()
            for name, p in self.model.named_parameters()
            if p.grad is not None and p.requires_grad
        }

    def physical(self, batch: Any) -> tuple[Gradient, float]:
        """Return gradient and loss of one physical batch, from the first state."""
        self.reset()
        value = self.loss(batch)
        value.backward()  # type: ignore[no-untyped-call]
        return self.gradient(), float(value.detach())

    def nudged(self, batch: Any, size: float) -> Gradient:
        """Return the gradient of a batch from parameters that are off by this relative error."""
        self.reset()
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in self.model.parameters():
                signs = torch.randint(0, 2, parameter.shape, generator=generator) * 2 - 1
                parameter.mul_(1 + 2 * size * signs.to(parameter))
        self.loss(batch).backward()  # type: ignore[no-untyped-call]
        return self.gradient()

    def accumulated(
        self,
        parts: Sequence[Any],
        counts: Sequence[int],
        optimizer: Any,
        *,
        replicas: int = 1,
        total: int | None = None,
    ) -> Update:
        """Run one group over the microbatches, from the first state, its step included."""
        self.reset()
        gradient: Gradient = {}
        contributions: list[float] = []

        def note(phase: str, microbatch: int | None) -> None:
            nonlocal gradient
            if phase == "optimizer_step" or (phase == "forward" and microbatch):
                before, gradient = gradient, self.gradient()
                contributions.append(difference(gradient, before, 1.0).worst_error)

        with user_code("the group failed"):
            outcome = run_group(
                self.model if self.wrapped is None else self.wrapped,
                optimizer,
                parts,
                loss=lambda _model, part: self.loss(part),
                counts=list(counts),
                total_count=total,
                replicas=replicas,
                on_phase=note,
            )
        return Update(
            gradient=gradient,
            parameters={} if isinstance(optimizer, NoStep) else self.parameters(),
            loss=float(outcome.loss),
            contributions=tuple(c for c, n in zip(contributions, counts, strict=True) if n),
        )

    def step_from(self, gradient: Gradient) -> dict[str, torch.Tensor]:
        """Return the parameters after one step from this gradient, from the first state."""
        self.reset()
        optimizer = self.optimizer()
        for name, parameter in self.model.named_parameters():
            if name in gradient:
                parameter.grad = gradient[name].to(parameter.dtype, copy=True)
        optimizer.step()
        return self.parameters()

    def parameters(self) -> dict[str, torch.Tensor]:
        """Return a copy of the trainable parameters."""
        return {
            name: p.detach().clone() for name, p in self.model.named_parameters() if p.requires_grad
        }


class NoStep:
    """An optimizer that leaves everything as it is."""

    def step(self) -> None:
        """Do nothing."""

    def zero_grad(self, *, set_to_none: bool = True) -> None:
        """Do nothing; the subject's reset clears gradients."""
