"""Checking a workload: its own model, batch, loss, count and optimizer, on real numbers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from memfit.errors import WorkloadError
from memfit.verification import Comparison, Finding, LossNature, Place
from memfit.verify.findings import finding
from memfit.verify.splits import choose_splits
from memfit.verify.worker import places
from memfit.verify.worker.causes import explain
from memfit.verify.worker.equality import Equality, in_float64
from memfit.verify.worker.examples import CannotSplit, Splitter
from memfit.verify.worker.gradients import Gradient, difference, is_finite
from memfit.verify.worker.lossgraph import LossReading, read_loss
from memfit.verify.worker.nature import loss_nature
from memfit.verify.worker.randomness import Draw, Draws, OtherGenerators
from memfit.verify.worker.sizing import PassMemory, choose_size, fits_in_float64
from memfit.verify.worker.state import Mixer, MixerSearch, SizeWatch
from memfit.verify.worker.subject import NoStep, Subject

Tell = Callable[[str], None]

_SHOWN = 3
_MIXED = 1e-6
"""Relative error of a gradient above which layers that mix examples are its cause."""
_VISIBLE = 0.01
"""Relative error in the weight of one microbatch that has to be visible."""
_SAME_LOSS = 1e-5
"""Relative difference of two losses of the same examples that rounding in float32 explains."""


@dataclass(slots=True)
class Checked:
    """What checking a workload led to."""

    logical_batch: int = 0
    """Examples that were compared."""
    findings: list[Finding] = field(default_factory=list)
    comparisons: list[Comparison] = field(default_factory=list)
    loss: LossNature | None = None
    notes: list[str] = field(default_factory=list)


class WorkloadCheck:
    """One check of one workload."""

    def __init__(
        self,
        subject: Subject,
        logical_batch: int | None,
        microbatch: int | None,
        tell: Tell,
        *,
        fewest: int = 0,
    ) -> None:
        """Prepare a check.

        Args:
            subject: The workload and its model.
            logical_batch: Examples of the physical batch; None for as many as do not take long.
            microbatch: Examples of a microbatch of the equal split; None for a quarter.
            tell: Told what is being done, in a few words.
            fewest: Examples that there have to be, at least.
        """
        self._subject = subject
        self._tell = tell
        self._result = Checked()
        if logical_batch is None:
            chosen = choose_size(subject, fewest, tell)
            self._result.notes += [chosen.note] if chosen.note else []
            logical_batch = chosen.size
        self._result.logical_batch = self._size = logical_batch
        self._splits = choose_splits(logical_batch, microbatch)
        self._draws: tuple[Draw, ...] = ()
        self._terms = 1
        self._pass_bytes = 0
        self._changed: dict[str, float] = {}

    def run(self) -> Checked:
        """Check everything that a workload can be checked for."""
        subject = self._subject
        self._tell(f"drawing {self._size} examples")
        batch = subject.batch(self._size)
        splitter = self._splitter(batch)
        if not self._look(batch):
            return self._result
        if splitter is None:
            self._find_moving_buffers(set())
        elif self._counts_are_sound(batch, splitter):
            known = self._in_float64(batch)
            try:
                subject.use(torch.float32 if known is None else torch.float64)
                self._compare(batch, splitter, known)
            finally:
                subject.use(torch.float32)
            self._find_draws(batch, splitter)
        return self._result

    def _in_float64(self, batch: Any) -> tuple[Gradient, float] | None:
        """Compute the physical batch in float64, or say why not."""
        if not fits_in_float64(self._subject, self._pass_bytes):
            why = "there is too little memory to compare in float64"
        else:
            self._tell("the physical batch in float64")
            made = in_float64(self._subject, batch)
            if made is not None:
                return made
            why = "the model does not run in float64"
        self._result.notes.append(f"{why}, so that everything is compared in float32")
        return None

    def _find(self, code: str, evidence: str, place: Place | None = None) -> None:
        self._result.findings.append(finding(code, evidence, place=place))

    def _place_of(self, name: str) -> Place | None:
        return places.of_method(type(self._subject.workload), name)

    def _splitter(self, batch: Any) -> Splitter | None:
        other = self._size - 1
        try:
            return Splitter(batch, self._size, self._subject.batch(other), other)
        except CannotSplit as error:
            self._find("MF104", _sentence(str(error)), self._place_of("batch"))
            return None

    # -- one forward pass --------------------------------------------------------------------

    def _look(self, batch: Any) -> bool:
        """Look at one pass in float32; return whether there is anything to compare."""
        subject = self._subject
        self._tell("looking at one forward and backward pass")
        subject.reset()
        others = OtherGenerators()
        memory = PassMemory(subject.device)
        with SizeWatch(subject.model) as sizes, Draws(still=False) as draws:
            value = subject.loss(batch)
        self._terms, self._draws = sizes.largest, draws.seen
        reading, first = read_loss(value), float(value.detach())
        value.backward()  # type: ignore[no-untyped-call]
        self._pass_bytes = memory.peak_bytes()
        drawn = others.drawn()
        if drawn:
            self._find(
                "MF402",
                f"One forward pass drew from {' and '.join(drawn)} generator.",
                self._place_of("loss"),
            )
        self._changed = subject.changed_buffers()
        if not self._gradients_are_sound(first):
            return False
        self._find_constant(reading)
        others.restore()
        subject.reset()
        with torch.no_grad():
            second = float(subject.value(batch))
        if abs(first - second) > _SAME_LOSS * max(abs(first), abs(second)):
            self._find(
                "MF304",
                f"The same examples, parameters, buffers and random state gave {first:.6g} at "
                f"the first call and {second:.6g} at the second.",
                self._place_of("loss"),
            )
            return False
        return True

    def _gradients_are_sound(self, loss: float) -> bool:
        subject = self._subject
        gradient = subject.gradient()
        bad = [n for n, g in gradient.items() if not bool(torch.isfinite(g).all())]
        if bad or not math.isfinite(loss):
            self._find(
                "MF103",
                f"The loss of the physical batch is {loss:g}; {len(bad)} of {len(gradient)} "
                f"gradients are not finite{_names(bad)}.",
                self._place_of("loss"),
            )
            return False
        missing = [
            n for n, p in subject.model.named_parameters() if p.requires_grad and n not in gradient
        ]
        if missing:
            self._find(
                "MF105",
                f"{len(missing)} of {len(missing) + len(gradient)} parameters got none"
                f"{_names(missing)}.",
                self._place_of("loss"),
            )
        given = {id(p) for group in _groups(subject.optimizer()) for p in group["params"]}
        left_out = [n for n, p in subject.model.named_parameters() if id(p) not in given]
        left_out = [n for n in left_out if n in gradient]
        if given and left_out:
            self._find(
                "MF601",
                f"{len(left_out)} of {len(gradient)} parameters with gradients are in no "
                f"parameter group{_names(left_out)}.",
                self._place_of("optimizer"),
            )
        return True

    def _find_constant(self, reading: LossReading | None) -> None:
        """Find a mean that is divided by a whole number."""
        if reading is None or not reading.divisors or reading.reduction != "mean":
            return
        by = reading.divisors[-1]
        if by > 1 and by == int(by):
            self._find(
                "MF203",
                f"loss() divides the mean over its {reading.elements} elements by {by:g}, and the "
                f"group weights its microbatches itself: every gradient is 1/{by:g} of the mean's.",
                self._place_of("loss"),
            )

    def _counts_are_sound(self, batch: Any, splitter: Splitter) -> bool:
        """Whether `count` says whole numbers, for the batch and for each split."""
        for sizes in (*self._splits, (self._size,)):
            parts = splitter.cut(batch, sizes)
            counts: list[Any] = list(self._subject.counts(parts, sizes))
            for size, count in zip(sizes, counts, strict=True):
                if isinstance(count, bool) or not isinstance(count, int) or count < 0:
                    self._find(
                        "MF206",
                        f"count() returned {count!r} for a microbatch of {size}.",
                        self._place_of("count"),
                    )
                    return False
        return True

    # -- equality ----------------------------------------------------------------------------

    def _compare(
        self, batch: Any, splitter: Splitter, known: tuple[Gradient, float] | None
    ) -> None:
        dtype = "float32" if known is None else "float64"
        result, subject = self._result, self._subject
        equality = Equality(
            subject,
            batch,
            splitter,
            dtype=dtype,
            terms=self._terms,
            held=["draws"] if self._draws else [],
            tell=self._tell,
            known=known,
        )
        mixers = self._mixers(batch)
        live = self._live_error(equality) if mixers else 0.0
        if not live <= _MIXED:
            self._hold(mixers, equality, live)
        made = equality.split(self._splits[0], step=True)
        self._find_extra_steps(equality.state_steps)
        self._find_moving_buffers({m.name for m in mixers})
        loss_of_group = equality.accumulated_loss
        for sizes in self._splits[1:]:
            if made is None:
                break
            result.comparisons.append(made)
            made = equality.split(sizes)
        if made is None:
            self._tell("the examples one by one")
            result.loss, empty = loss_nature(subject, batch, splitter, self._size, equality)
            self._find(
                "MF103",
                "The gradient of the physical batch is finite, and that of its microbatches is "
                f"not{empty}.",
                self._place_of("loss"),
            )
            return
        result.comparisons.append(made)
        if all(c.equal for c in result.comparisons):
            result.loss = self._nature_of_equal(batch, splitter)
        else:
            self._tell("the examples one by one")
            result.loss, _ = loss_nature(subject, batch, splitter, self._size, equality)
            unequal = next(c for c in result.comparisons if not c.equal)
            code, evidence, method = explain(
                unequal,
                result.loss,
                size=self._size,
                counted=subject.workload.counts_elements(),
                loss=equality.loss,
                loss_of_group=loss_of_group,
            )
            self._find(code, evidence, self._place_of(method))
        self._find_blindness(dtype)
        in32 = equality.split_in_float32(self._splits[0])
        if in32 is not None:
            result.comparisons.append(in32)
        if equality.unheld:
            result.notes.append(
                f"draws by {', '.join(sorted(equality.unheld))} could not be held still"
            )
        if result.comparisons[0].step_error is None:
            result.notes.append("the optimizer step changed nothing, or wants a closure")

    def _find_blindness(self, dtype: str) -> None:
        """Say so when an error of one percent could have hidden behind rounding."""
        seen = [c for c in self._result.comparisons if c.visible is not None]
        worst = max(seen, key=lambda c: c.visible or 0.0, default=None)
        if worst is None or worst.visible is None or worst.visible <= _VISIBLE:
            return
        self._find(
            "MF106",
            f"Split as {'+'.join(map(str, worst.sizes))}, an error below "
            f"{worst.visible:.2g} times the weight of one microbatch could not be told from "
            f"rounding: in {dtype} that may reach {worst.tolerance:.1g} of the gradient.",
            self._place_of("loss"),
        )

    def _live_error(self, equality: Equality) -> float:
        """Return the error while layers mix; infinite where they refuse the microbatch."""
        try:
            return equality.error(self._splits[0])
        except WorkloadError:  # batch normalisation over a single value, for example
            return math.inf

    def _find_extra_steps(self, steps: int) -> None:
        if steps > 1:
            self._find(
                "MF603",
                f"After one group the optimizer's state counts {steps} steps.",
                self._place_of("optimizer"),
            )

    def _nature_of_equal(self, batch: Any, splitter: Splitter) -> LossNature:
        """Say what a loss is whose splits, uneven ones too, were equal by their counts."""
        if not self._subject.workload.counts_elements():
            weights = (1 / self._size,) * self._size
            return LossNature(kind="mean", over="examples", weights=weights, factor=1.0)
        sizes = (1,) * self._size
        counts = tuple(self._subject.counts(splitter.cut(batch, sizes), sizes))
        total = sum(counts) or 1
        return LossNature(
            kind="mean",
            over="elements",
            weights=tuple(c / total for c in counts),
            counts=counts,
            factor=1.0,
        )

    # -- layers and buffers ------------------------------------------------------------------

    def _mixers(self, batch: Any) -> tuple[Mixer, ...]:
        """Look for layers that mix examples."""
        subject = self._subject
        self._tell("looking for layers that mix examples")
        found: tuple[Mixer, ...] = ()
        for inside in (False, True):
            subject.reset()
            search = MixerSearch(subject.model, self._size, inside=inside)
            with Draws(still=True), search, torch.no_grad():
                subject.value(batch)
            found = search.found()
            if search.conclusive and not found:
                break
        return found

    def _hold(self, mixers: tuple[Mixer, ...], equality: Equality, live: float) -> None:
        """Put layers that mix examples into eval mode, and say what they make of the gradient."""
        subject = self._subject
        subject.frozen = frozenset(m.module for m in mixers)
        equality.held.append("statistics")
        equality.measure()
        apart = "not defined" if math.isinf(live) else f"off by {live:.2g} of the batch's"
        kinds = Counter(type(m.module).__name__ for m in mixers)
        shown = ", ".join(f"{kind} ({number})" for kind, number in kinds.most_common(_SHOWN))
        self._find(
            "MF301",
            f"Without half of their neighbours, the same examples leave {len(mixers)} "
            f"{'layer' if len(mixers) == 1 else 'layers'} changed by up to "
            f"{max(m.change for m in mixers):.2g}: {shown}. Split as "
            f"{'+'.join(map(str, self._splits[0]))}, the accumulated gradient is {apart}; "
            "the comparison is made again with these layers in eval mode."
            + self._running_statistics(mixers),
            mixers[0].place,
        )

    def _running_statistics(self, mixers: Sequence[Mixer]) -> str:
        owners = {m.name for m in mixers}
        moved = [n for n in self._changed if n.rpartition(".")[0] in owners]
        if not moved:
            return ""
        return (
            f" Their {len(moved)} running statistics are updated {len(self._splits[0])} times per "
            "optimizer step."
        )

    def _find_moving_buffers(self, explained: set[str]) -> None:
        moved = {n: c for n, c in self._changed.items() if n.rpartition(".")[0] not in explained}
        if not moved:
            return
        name = max(moved, key=lambda n: moved[n])
        owner = self._subject.model.get_submodule(name.rpartition(".")[0])
        self._find(
            "MF302",
            f"One forward pass changes {len(moved)} "
            f"{'buffer' if len(moved) == 1 else 'buffers'}, most {name} (by {moved[name]:.2g}); "
            f"a group of {len(self._splits[0])} microbatches changes them "
            f"{len(self._splits[0])} times.",
            places.of_method(type(owner), "forward") or self._place_of("model"),
        )

    # -- draws -------------------------------------------------------------------------------

    def _find_draws(self, batch: Any, splitter: Splitter) -> None:
        """Say what draws, and how far one group's draws lead from the physical batch's."""
        if not self._draws:
            return
        subject = self._subject
        self._tell("the same with random draws")
        whole, _ = subject.physical(batch)
        sizes = self._splits[0]
        parts = splitter.cut(batch, sizes)
        group = subject.accumulated(parts, subject.counts(parts, sizes), NoStep()).gradient
        apart = ""
        if is_finite(whole) and is_finite(group):
            scale = math.sqrt(sum(float(g.double().norm()) ** 2 for g in whole.values())) or 1.0
            apart = (
                f" With the draws, one group's gradient is off by "
                f"{difference(group, whole, scale).error:.2g}; the comparison is made with every "
                "draw replaced by its mean."
            )
        number = sum(d.times for d in self._draws)
        named = sorted({f"{d.place}" for d in self._draws if d.place})
        where = f" at {', '.join(named[:_SHOWN])}{' …' if len(named) > _SHOWN else ''}"
        self._find(
            "MF401",
            f"One forward pass draws {number} {'time' if number == 1 else 'times'}"
            f"{where if named else ''}.{apart}",
            next((d.place for d in self._draws if d.place), None),
        )


def accepted(findings: Sequence[Finding], codes: Sequence[str]) -> list[Finding]:
    """Mark the findings that the user has accepted."""
    return [replace(f, accepted=f.code in codes) for f in findings]


def _groups(optimizer: Any) -> list[dict[str, Any]]:
    return list(getattr(optimizer, "param_groups", []))


def _names(names: Sequence[str]) -> str:
    if not names:
        return ""
    return f": {', '.join(names[:_SHOWN])}{' …' if len(names) > _SHOWN else ''}"


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."
