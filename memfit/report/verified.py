"""A verification in words, for the terminal and the page alike."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memfit.report.words import TIMES
from memfit.verification import Comparison, LossNature, Outcome, Verification

if TYPE_CHECKING:
    from memfit.records import ProbeResult

_LONG_SPLIT = 8
_ITEMS = 8
_SMALL, _LARGE = 1e-3, 1e3


def answer(made: Verification) -> str:
    """Return the answer in one sentence."""
    if made.outcome is Outcome.EQUAL:
        return _equal(made)
    reasons = _reasons(made)
    if made.outcome is Outcome.DIFFERENT and nothing_compared(made):
        why = "; ".join(f"{f.title} ({f.code})" for f in made.findings if f.severity == "error")
        return f"No gradient could be compared with that of the logical batch: {why}."
    if made.outcome is Outcome.DIFFERENT:
        return f"Accumulation does not reproduce the logical batch{reasons}{_but_held(made)}."
    return f"It is not known whether accumulation reproduces the logical batch{reasons}."


def nothing_compared(made: Verification) -> bool:
    """Whether what was found left nothing to compare, neither gradients nor a loop's groups."""
    return not made.comparisons and made.loop is None and made.replicas is None


def _but_held(made: Verification) -> str:
    """Say that what is compared is equal, where only what was held for it makes the difference."""
    if not made.comparisons or not all(c.equal for c in made.comparisons):
        return ""
    if not any("statistics" in c.held for c in made.comparisons):
        return ""
    if any(f.severity != "remark" and f.code != "MF301" for f in made.findings):
        return ""  # something else is to be told as well
    return ": layers mix the examples of a microbatch. With these in eval mode it does"


def _equal(made: Verification) -> str:
    if not made.comparisons:
        groups = made.loop.group_count if made.loop else 0
        return (
            f"The loop trains the mean over each logical batch, in {groups} groups that were seen."
        )
    judged = [c for c in made.comparisons if c.dtype == made.comparisons[0].dtype]
    worst = max(c.error for c in judged)
    which = "" if all(c.equal for c in judged) else " but for what was accepted"
    splits = ", ".join(split(c) for c in judged)
    if any("statistics" in c.held for c in judged):
        which += ", with the layers that mix examples in eval mode"
    return (
        f"Accumulation reproduces the logical batch{which}: {made.logical_batch} examples split as "
        f"{splits} give its gradient within {error(worst)} in {judged[0].dtype}."
    )


def of_probe(result: ProbeResult) -> str:
    """Say whether the workload of a probe was verified, and what came out of it."""
    made = result.verification
    if made is None:
        return (
            f"not verified: `memfit verify {result.workload.target}` checks that it trains the same"
        )
    changed = [
        f"{name}={made.parameters.get(name)}"
        for name, value in result.workload.parameters.items()
        if made.parameters.get(name) != value
    ]
    scaled = f" with {', '.join(changed)}" if changed else ""
    day = made.created.partition("T")[0]
    differs = "could not be compared" if nothing_compared(made) else "not equal"
    what = {
        Outcome.EQUAL: "equal to the logical batch",
        Outcome.DIFFERENT: f"{differs} to the logical batch{_reasons(made)}",
        Outcome.UNKNOWN: f"could not be judged{_reasons(made)}",
    }[made.outcome]
    return f"verified on {day}{scaled}: {what}"


def _reasons(made: Verification) -> str:
    codes = ", ".join(
        dict.fromkeys(f.code for f in made.findings if f.severity != "remark" and not f.accepted)
    )
    return f" ({codes})" if codes else ""


def split(made: Comparison) -> str:
    """Write the sizes of a split, such as `3+3+2` or `32 x 1`."""
    if len(made.sizes) > _LONG_SPLIT and len(set(made.sizes)) == 1:
        return f"{len(made.sizes)} {TIMES} {made.sizes[0]}"
    shown = "+".join(str(size) for size in made.sizes[:_LONG_SPLIT])
    return shown + ("+…" if len(made.sizes) > _LONG_SPLIT else "")


def error(value: float | None) -> str:
    """Write a relative error."""
    return "not compared" if value is None else f"{value:.1e}"


def seen_error(made: Verification) -> str | None:
    """Say which error in the weight of a microbatch would have been found."""
    judged = [c for c in made.comparisons if c.dtype == made.comparisons[0].dtype]
    errors = [c.visible for c in judged if c.visible is not None]
    if not errors:
        return None
    return f"an error of {percent(max(errors))} in the weight of any one microbatch"


def percent(share: float) -> str:
    """Write a share, however small."""
    value = 100 * share
    return f"{value:.2g} %" if _SMALL <= value < _LARGE else f"{value:.0e} %"


def verdict(made: Comparison) -> str:
    """Say what a comparison came to, and whether layers that mix examples were held for it."""
    said = "equal" if made.equal else "different"
    return f"{said} (eval)" if "statistics" in made.held else said


def held(made: Comparison) -> str:
    """Say what was held still on both sides."""
    words = {"draws": "draws at their means", "statistics": "batch statistics frozen"}
    return ", ".join(words[h] for h in made.held) or "nothing"


def nature(loss: LossNature) -> str:
    """Say what the loss is."""
    if loss.kind == "mean":
        return _mean(loss)
    return {
        "sum": "a sum",
        "scaled": f"no mean: the examples' weights are {_items(_shares(loss))}",
        "coupled": "no sum of the examples' own losses",
        "unknown": "not known",
    }[loss.kind]


def _mean(loss: LossNature) -> str:
    if loss.over == "examples":
        return "a mean over examples"
    if not loss.counts:
        return f"a mean over elements; the examples' shares are {_items(_shares(loss))}"
    if len(set(loss.counts)) == 1:
        return f"a mean over elements, {loss.counts[0]:,} in each example"
    counted = _items([f"{c:,}" for c in loss.counts])
    return f"a mean over elements, of which the examples have {counted}"


def _shares(loss: LossNature) -> list[str]:
    return [f"{w:.3g}" for w in loss.weights]


def _items(items: list[str]) -> str:
    return ", ".join(items[:_ITEMS]) + (", …" if len(items) > _ITEMS else "")


def rows(made: Verification) -> list[tuple[str, str]]:
    """Return name and value of the facts under the answer."""
    found = [("workload", f"{made.workload} ({made.target})")]
    if made.parameters:
        found.append(("parameters", ", ".join(f"{k}={v}" for k, v in made.parameters.items())))
    if made.loss is not None:
        found.append(("the loss is", nature(made.loss)))
    visible = seen_error(made)
    if visible is not None:
        found.append(("would be seen", visible))
    if made.loop is not None:
        found += _loop_rows(made)
    if made.replicas is not None:
        check = made.replicas
        found.append(
            (
                f"{check.replicas} replicas",
                f"error {error(check.error)} with the factor D, {check.ratio_without:.3f} of the "
                f"gradient without it, {error(check.error_mean_of_means)} off as a mean of means "
                f"({_items([str(c) for c in check.counts])} elements)",
            )
        )
    found.append(("device", f"{made.device}, torch {made.torch}, {made.wall_s:.1f} s"))
    return found


def _loop_rows(made: Verification) -> list[tuple[str, str]]:
    loop = made.loop
    assert loop is not None
    steps = f"{loop.steps_attempted} attempted, {loop.steps_applied} applied"
    if loop.steps_skipped:
        steps += f", {loop.steps_skipped} skipped by the scaler"
    errors = [g.error for g in loop.groups if g.error is not None]
    found = [
        ("groups", f"{loop.group_count} seen, {loop.backward_passes} backward passes"),
        ("optimizer steps", steps),
        ("schedule steps", str(loop.schedule_steps)),
    ]
    if errors:
        found.append(
            ("gradient", f"off by {error(max(errors))} at most from the mean of its group")
        )
    if loop.ended == "time":
        found.append(("watched", "until the time was up; the program was ended there"))
    return found
