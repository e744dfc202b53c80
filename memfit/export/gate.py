"""A gate's result for people and machines that read pull requests.

Markdown, GitHub's workflow commands and JUnit XML. All figures that come from a virtual GPU say so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

from memfit.records import Source
from memfit.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memfit.gate import Change, Comparison, Figure, GateResult

_FAILURES = {
    "more": ("needs more memory", "need more memory"),
    "failed": (
        "is over a limit or does not run any more",
        "are over limits or do not run any more",
    ),
    "not comparable": ("cannot be compared", "cannot be compared"),
    "error": ("fails by itself", "fail by themselves"),
}
_SHOWN_CHANGES = 10
_SUMMARY_BYTES = 900_000
"""GitHub drops a step's summary above 1024k."""
_FEW = 3
_ANNOTATIONS = 10
"""GitHub shows no more of a step."""


def delta_words(size: int) -> str:
    """Write a change with its sign: `+1.20 GiB`."""
    return f"{'+' if size >= 0 else '-'}{format_bytes(abs(size))}"


def pair_words(pair: tuple[int | None, int | None]) -> str:
    """Write a figure before and now; once where it is the same."""
    before, now = pair
    if now is None:
        return "not measured"
    if before is None or before == now:
        return format_bytes(now)
    share = f", {(now - before) / before:+.1%}" if before else ""
    one, other = format_bytes(before), format_bytes(now)
    if one == other:
        one, other = f"{before:,} B", f"{now:,} B"
    return f"{one} → {other} ({delta_words(now - before)}{share})"


def phase_words(figure: Figure, *, several: bool) -> str:
    """Name a figure: its phase, and its device where there are several."""
    name = figure.phase.replace("_", " ")
    return f"{name}, rank {figure.rank} device {figure.device}" if several else name


def change_words(change: Change) -> str:
    """Write one change: `+1.20 GiB activations, layers.3.mlp, model.py:41`."""
    words = [f"{delta_words(change.bytes)} {change.category}"]
    words += [word for word in (change.module, change.place) if word]
    return ", ".join(words)


def sentence(result: GateResult) -> str:
    """Say in one sentence how it ended."""
    failing = [c for c in result.workloads if c.fails]
    count = len(result.workloads)
    workloads = "1 workload" if count == 1 else f"{count} workloads"
    word = " (virtual)" if is_virtual(result) else ""
    if not failing:
        return f"passed: {workloads} within the limits of {result.baseline}{word}"
    told = []
    for verdict, (one, more) in _FAILURES.items():
        number = sum(c.verdict == verdict for c in failing)
        if number:
            told.append(f"{number} {one if number == 1 else more}")
    return f"failed: of {workloads}, {', '.join(told)}{word}"


def is_virtual(result: GateResult) -> bool:
    """Whether any figure comes from a virtual GPU."""
    return any(c.source is Source.VIRTUAL for c in result.workloads)


def limits_words(result: GateResult) -> str:
    """Say what the limits are."""
    limits = result.limits
    words = (
        f"an increase fails above {limits.max_increase:.4%}".replace(".0000", "")
        + f" and {format_bytes(limits.min_delta_bytes)}"
    )
    if limits.limit_bytes is not None:
        words += f"; no device may use more than {format_bytes(limits.limit_bytes)}"
    return words


# -- Markdown --------------------------------------------------------------------------------


def markdown(result: GateResult) -> str:
    """Write a table of all workloads, and under it what changed in each."""
    lines = [f"### memfit gate {sentence(result)}", ""]
    lines += [
        "| | workload | group | allocated | reserved | device used |",
        "|---|---|---|---|---|---|",
    ]
    for comparison in result.workloads:
        lines.append(_row(comparison))
    for comparison in result.workloads:
        lines += _section(comparison)
    lines += ["", f"_{limits_words(result)}; memfit {result.memfit}_", ""]
    text = "\n".join(lines)
    while len(text.encode()) > _SUMMARY_BYTES:
        text = text[: len(text) * 9 // 10] + "\n\n_cut: too long for a summary_\n"
    return text


def _row(comparison: Comparison) -> str:
    peak = next((f for f in comparison.figures if f.phase == "peak"), None)
    group = (
        f"{comparison.microbatch} × {comparison.accumulation_steps}"  # noqa: RUF001
        if comparison.microbatch
        else ""
    )
    cells = [f"`{comparison.mark}`", _cell(_named(comparison)), group]
    if peak is None:
        cells += [
            _cell(comparison.reasons[0].splitlines()[0] if comparison.reasons else ""),
            "",
            "",
        ]
    else:
        cells += [
            pair_words(peak.allocated_bytes),
            pair_words(peak.reserved_bytes),
            pair_words(peak.used_bytes),
        ]
    return f"| {' | '.join(cells)} |"


def _named(comparison: Comparison) -> str:
    virtual = " (virtual)" if comparison.source is Source.VIRTUAL else ""
    return f"{comparison.name}{virtual}"


def _section(comparison: Comparison) -> list[str]:
    if comparison.verdict == "same" and not comparison.fits:
        return []
    lines = ["", f"#### `{comparison.mark}` {_cell(_named(comparison))}", ""]
    lines += [f"- {_cell(reason)}" for reason in comparison.reasons]
    lines += [
        f"- {'fits' if fit.now else 'does not fit'} on {fit.card} `{fit.mark}`"
        for fit in comparison.fits
    ]
    if comparison.changes:
        lines += ["", f"What changed at the peak of {_phase(comparison)}:", ""]
        lines += ["| change | what | module | line | |", "|---:|---|---|---|---|"]
        rows = [_change_row(change) for change in comparison.changes]
        lines += rows[:_SHOWN_CHANGES]
        if rows[_SHOWN_CHANGES:]:
            lines += ["", f"<details><summary>{len(rows) - _SHOWN_CHANGES} more</summary>", ""]
            lines += ["| change | what | module | line | |", "|---:|---|---|---|---|"]
            lines += [*rows[_SHOWN_CHANGES:], "", "</details>"]
    if comparison.suspects:
        lines += ["", f"Lines that held nothing before: {_suspect_words(comparison)}"]
    several = len({(f.rank, f.device) for f in comparison.figures}) > 1
    phases = [f for f in comparison.figures if f.phase != "peak"]
    if phases:
        lines += ["", "<details><summary>every phase</summary>", ""]
        lines += ["| | phase | allocated | reserved | device used |", "|---|---|---|---|---|"]
        lines += [
            f"| `{f.mark}` | {phase_words(f, several=several)} | {pair_words(f.allocated_bytes)} "
            f"| {pair_words(f.reserved_bytes)} | {pair_words(f.used_bytes)} |"
            for f in phases
        ]
        lines += ["", "</details>"]
    return lines


def _suspect_words(comparison: Comparison) -> str:
    return "; ".join(
        f"{_cell(c.place or '')} `{_cell(c.text).replace('`', '')}` "
        f"({delta_words(c.bytes)} {c.category})"
        for c in comparison.suspects[:_FEW]
    )


def _phase(comparison: Comparison) -> str:
    return (comparison.explained or "").replace("_", " ")


def _change_row(change: Change) -> str:
    text = f"`{_cell(change.text).replace('`', '')}`" if change.text else ""
    return (
        f"| {delta_words(change.bytes)} | {change.category} | {_cell(change.module)} "
        f"| {_cell(change.place or '')} | {text} |"
    )


def _cell(text: str) -> str:
    """Keep a text from breaking a table or from being read as markup."""
    flat = " ".join(text.split())
    return flat.replace("&", "&amp;").replace("<", "&lt;").replace("|", "\\|")


# -- GitHub ----------------------------------------------------------------------------------


def github(result: GateResult) -> list[str]:
    """Write workflow commands, one for each workload that fails, at the line that grew most."""
    found = []
    for comparison in result.workloads:
        if not comparison.fails:
            continue
        file, line = _blamed(comparison, result.baseline)
        told = [*comparison.reasons, *(change_words(c) for c in _growth(comparison)[:_FEW])]
        where = f"file={_property(file)}" + (f",line={line}" if line else "")
        found.append(
            f"::error {where},title={_property(f'memfit gate: {comparison.name}')}::"
            f"{_data(chr(10).join(told))}"
        )
    return found[:_ANNOTATIONS]


def _growth(comparison: Comparison) -> Sequence[Change]:
    return [change for change in comparison.changes if change.bytes > 0]


def _blamed(comparison: Comparison, baseline: str) -> tuple[str, int | None]:
    """The likeliest line of the project; the baseline where none is known."""
    for change in (*comparison.suspects, *_growth(comparison)):
        if change.place and change.text:
            file, _, line = change.place.rpartition(":")
            return file, int(line)
    return baseline, None


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


# -- JUnit -----------------------------------------------------------------------------------


def junit(result: GateResult) -> str:
    """Write JUnit XML: a workload is a class, a figure of it a test."""
    suites = ET.Element("testsuites", name="memfit gate")
    for comparison in result.workloads:
        cases = _cases(comparison)
        suite = ET.SubElement(suites, "testsuite", name=_xml(comparison.name))
        failures = errors = 0
        for name, kind, message, body in cases:
            case = ET.SubElement(
                suite, "testcase", classname=_xml(comparison.name), name=_xml(name), time="0"
            )
            if kind is not None:
                failures += kind == "failure"
                errors += kind == "error"
                ET.SubElement(
                    case, kind, message=_xml(message), type=comparison.verdict
                ).text = _xml(body)
            elif body:
                ET.SubElement(case, "system-out").text = _xml(body)
        suite.set("tests", str(len(cases)))
        suite.set("failures", str(failures))
        suite.set("errors", str(errors))
    for name in ("tests", "failures", "errors"):
        suites.set(name, str(sum(int(suite.get(name, "0")) for suite in suites)))
    ET.indent(suites)
    return (
        '<?xml version="1.0" encoding="utf-8"?>\n' + ET.tostring(suites, encoding="unicode") + "\n"
    )


def _cases(comparison: Comparison) -> list[tuple[str, str | None, str, str]]:
    """Name, kind of failure or None, message and text of every test of a workload."""
    changes = "\n".join(change_words(change) for change in comparison.changes)
    virtual = " (virtual)" if comparison.source is Source.VIRTUAL else ""
    if not comparison.figures:
        kind = "failure" if comparison.verdict == "failed" else "error"
        reasons = "\n".join(comparison.reasons)
        return [("measured", kind if comparison.fails else None, reasons, reasons)]
    several = len({(f.rank, f.device) for f in comparison.figures}) > 1
    cases: list[tuple[str, str | None, str, str]] = []
    for figure in comparison.figures:
        told = pair_words(figure.allocated_bytes) + virtual
        if figure.allocated_bytes[1] is None:
            told = pair_words(figure.used_bytes) + virtual
        failed = figure.mark == "+"
        name = f"{phase_words(figure, several=several)} allocated"
        cases.append(
            (name, "failure" if failed else None, told, f"{told}\n{changes}" if failed else told)
        )
    grown = {"+"} & {figure.mark for figure in comparison.figures}
    if comparison.verdict == "failed" and (reasons := "\n".join(comparison.reasons)):
        cases.append(("limits", "failure", reasons, f"{reasons}\n{changes}"))
    elif comparison.verdict == "failed" and not grown:
        cases.append(("limits", "failure", comparison.verdict, changes))
    return cases


def _xml(text: str) -> str:
    """Drop the characters that XML cannot hold."""
    return "".join(c for c in text if c in "\t\n" or c.isprintable())
