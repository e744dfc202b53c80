"""The gradient of one physical batch beside accumulated ones, and what rounding explains."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from memfit.verification import Comparison
from memfit.verify.tolerance import UNIT_ROUNDOFF, tolerance
from memfit.verify.worker.examples import Splitter
from memfit.verify.worker.gradients import Gradient, difference, is_finite, norm
from memfit.verify.worker.randomness import Draws
from memfit.verify.worker.subject import NoStep, Subject, Update

Held = Literal["draws", "statistics"]

_STEP_MARGIN = 8.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """One optimizer step from the gradient of the physical batch."""

    parameters: dict[str, torch.Tensor]
    length: float
    """Norm of what it changed."""
    tolerance: float
    """What rounding may change of it, relative to that."""


_NO_STEP = _Step(parameters={}, length=0.0, tolerance=0.0)


class Equality:
    """Comparisons of one batch of examples, in one dtype, with draws held still."""

    def __init__(
        self,
        subject: Subject,
        batch: Any,
        splitter: Splitter,
        *,
        dtype: str,
        terms: int,
        held: Sequence[Held],
        tell: Callable[[str], None],
        known: tuple[Gradient, float] | None = None,
    ) -> None:
        """Prepare comparisons.

        Args:
            subject: The workload, already in `dtype`.
            batch: The physical batch.
            splitter: What cuts it.
            dtype: `float64`, or `float32` where the model has no other.
            terms: Terms that an entry of a gradient sums at most.
            held: What is held still on both sides.
            tell: Told what is being done.
            known: Gradient and loss of the physical batch, where they are known.
        """
        self._subject = subject
        self._batch = batch
        self._splitter = splitter
        self._dtype = dtype
        self._terms = terms
        self._tell = tell
        self.held = list(held)
        self.unheld: set[str] = set()
        """Operators whose draws could not be held still."""
        self.state_steps = 0
        """The most steps that the optimizer's own state counts after one group."""
        self.accumulated_loss = math.nan
        """Loss of the group that was compared last."""
        self.measure(known)

    def measure(self, known: tuple[Gradient, float] | None = None) -> None:
        """Compute the physical batch, with what is held still now, unless it is known."""
        if known is None:
            self._tell(f"the physical batch in {self._dtype}")
        self._expected: _Step | None = None
        self.whole, self.loss = self._physical(self._batch) if known is None else known
        self.scale = norm(self.whole) or 1.0
        self.in_float32: Gradient | None = None
        self._amplification: float | None = None

    def _measure_amplification(self) -> float:
        """Measure what the network does to rounding, in units of roundoff."""
        if self._dtype == "float64":
            self._tell("the physical batch in float32")
            self._subject.use(torch.float32)
            other, _ = self._physical(self._batch)
            self._subject.use(torch.float64)
            self.in_float32 = other
            return self._apart(other) / UNIT_ROUNDOFF["float32"]
        # The same examples in another order, and parameters that are off in their last digit.
        turned, _ = self._physical(self._splitter.turned(self._batch))
        with Draws(still=True):
            nudged = self._subject.nudged(self._batch, UNIT_ROUNDOFF["float32"])
        return max(self._apart(turned), self._apart(nudged)) / UNIT_ROUNDOFF["float32"]

    def _apart(self, other: Gradient) -> float:
        return difference(other, self.whole, self.scale).worst_error

    def _physical(self, batch: Any) -> tuple[Gradient, float]:
        with Draws(still=True) as draws:
            made = self._subject.physical(batch)
        self.unheld |= draws.unheld
        return made

    def tolerance(self, dtype: str | None = None) -> float:
        """Return the largest error of a gradient that rounding explains."""
        if self._amplification is None:
            self._amplification = self._measure_amplification()
        return tolerance(dtype or self._dtype, terms=self._terms, amplification=self._amplification)

    def error(self, sizes: Sequence[int]) -> float:
        """Return the relative error of one split's gradient; infinite where it is no number."""
        self._tell(f"microbatches of {'+'.join(map(str, sizes))} in {self._dtype}")
        update = self._accumulate(sizes, NoStep())
        apart = difference(update.gradient, self.whole, self.scale).error
        return apart if math.isfinite(apart) else math.inf

    def split(self, sizes: Sequence[int], *, step: bool = False) -> Comparison | None:
        """Compare one split, and with `step` the optimizer step after it.

        Returns:
            The comparison, or None where the accumulated gradient is no number.
        """
        self._tell(f"microbatches of {'+'.join(map(str, sizes))} in {self._dtype}")
        optimizer = self._subject.optimizer() if step else NoStep()
        update = self._accumulate(sizes, optimizer)
        self.state_steps = max(self.state_steps, _state_steps(optimizer))
        del optimizer  # its state is as large as the model
        self.accumulated_loss = update.loss
        if not is_finite(update.gradient):
            return None
        apart = difference(update.gradient, self.whole, self.scale)
        step_error, step_limit = self._step(update) if step else (None, None)
        return Comparison(
            sizes=tuple(sizes),
            dtype=self._dtype,
            held=tuple(self.held),
            error=apart.error,
            tolerance=self.tolerance(),
            worst_parameter=apart.worst_parameter,
            worst_error=apart.worst_error,
            step_error=step_error,
            step_tolerance=step_limit,
            visible=self._visible(update, self._dtype),
        )

    def _visible(self, update: Update, dtype: str) -> float | None:
        """Return the smallest error in the weight of one microbatch that would have been found.

        Twice the tolerance, so that it shows even where rounding takes off as much as it may. What
        adds nothing in float32 may have been lost in rounding; in float64 it has no gradient.
        """
        lost = UNIT_ROUNDOFF[dtype] * self.scale if dtype == "float32" else 0.0
        least = min((c for c in (c or lost for c in update.contributions) if c > 0), default=None)
        return None if least is None else 2 * self.tolerance(dtype) * self.scale / least

    def split_in_float32(self, sizes: Sequence[int]) -> Comparison | None:
        """Compare one split in float32 with the physical batch in float32."""
        if self.in_float32 is None:
            return None
        self._tell(f"microbatches of {'+'.join(map(str, sizes))} in float32")
        self._subject.use(torch.float32)
        update = self._accumulate(sizes, NoStep())
        self._subject.use(torch.float64)
        apart = difference(update.gradient, self.in_float32, self.scale)
        return Comparison(
            sizes=tuple(sizes),
            dtype="float32",
            held=tuple(self.held),
            error=apart.error,
            tolerance=self.tolerance("float32"),
            worst_parameter=apart.worst_parameter,
            worst_error=apart.worst_error,
            visible=self._visible(update, "float32"),
        )

    def _accumulate(self, sizes: Sequence[int], optimizer: Any) -> Update:
        parts = self._splitter.cut(self._batch, sizes)
        counts = self._subject.counts(parts, sizes)
        with Draws(still=True):
            return self._subject.accumulated(parts, counts, optimizer)

    def _step(self, update: Update) -> tuple[float | None, float | None]:
        """Compare the parameters after one step, and say what rounding may do to them.

        What an optimizer makes of a small error is measured: the step is made once more from a
        gradient that is off by the tolerance.
        """
        if self._expected is None:
            self._expected = self._expect_step()
        step = self._expected
        if step is _NO_STEP:
            return None, None
        apart = difference(update.parameters, step.parameters, step.length).error
        return apart, step.tolerance

    def _expect_step(self) -> _Step:
        """Make the step of the physical batch, and one from a gradient that is slightly off."""
        subject = self._subject
        try:
            expected = subject.step_from(self.whole)
            disturbed = subject.step_from(_disturbed(self.whole, self.tolerance() * self.scale))
        except TypeError:  # it wants a closure
            return _NO_STEP
        subject.reset()
        before = subject.parameters()
        length = difference(expected, before, 1.0).error
        if not length or not math.isfinite(length):
            return _NO_STEP
        rounding = UNIT_ROUNDOFF[self._dtype] * norm(before) / length
        moved = difference(disturbed, expected, length).error
        return _Step(
            parameters=expected, length=length, tolerance=_STEP_MARGIN * (moved + rounding)
        )


def in_float64(subject: Subject, batch: Any) -> tuple[Gradient, float] | None:
    """Return gradient and loss of a batch in float64; the model is in float32 afterwards.

    Returns:
        Them, or None where the model does not run in float64.
    """
    try:
        subject.use(torch.float64)
        with Draws(still=True):
            value = subject.loss(batch)
            value.backward()  # type: ignore[no-untyped-call]
        gradient = subject.gradient()
    except Exception:  # noqa: BLE001 - whatever it is, float32 is the answer
        return None
    else:
        wide = value.dtype is torch.float64 and bool(torch.isfinite(value))
        if not wide or any(g.dtype is not torch.float64 for g in gradient.values()):
            return None
        return gradient, float(value.detach())
    finally:
        subject.use(torch.float32)


def _state_steps(optimizer: Any) -> int:
    """Return the steps that an optimizer's state counts; 0 where it counts none."""
    states = getattr(optimizer, "state", {}).values()
    steps = [state["step"] for state in states if isinstance(state, dict) and "step" in state]
    return int(max((float(step) for step in steps), default=0.0))


def _disturbed(gradient: Gradient, size: float) -> Gradient:
    """Return the gradient with a random error of this norm, where it is not exactly zero."""
    entries = sum(g.numel() for g in gradient.values()) or 1
    each = size / math.sqrt(entries)
    generator = torch.Generator().manual_seed(0)
    made = {}
    for name, value in gradient.items():
        signs = torch.randint(0, 2, value.shape, generator=generator).to(value) * 2 - 1
        made[name] = value + each * signs * (value != 0)
    return made
