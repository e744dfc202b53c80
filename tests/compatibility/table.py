"""The table's records, and how they are shown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from memfit.units import MIB
from tests.compatibility.catalogue import items

Run = dict[str, Any]
"""What one environment gave: its `torch`, `packages`, and `rows` by key."""

RESULTS = {
    "works": "works",
    "values": "works with values",
    "refused": "refused",
    "absent": "not in this build",
    "missing": "not installed",
    "fails": "**fails**",
    "crashes": "**crashes**",
    "hangs": "**hangs**",
}

_HEAD = """# What trains on the virtual GPU

One line for each kind of training code, each a real run in a process of its own (two under
torchrun where it says so) on a virtual H100 80GB: no kernel runs, and every figure is virtual.
*works* means that the run came to its end, that its parameters got gradients and optimizer states,
and that its process left in order; it says nothing about how close the peaks are to a real card's.
*works with values* means that it needs what only a kernel computes: it fails with the bare driver,
and comes to its end with values beside it, as in the first pass of a trial of `memfit probe`.
Peaks are PyTorch's own, of the device that took the most. *Invented* names the functions of
NVIDIA's libraries whose results had to be made up; where that is the size of a workspace, a real
card may take more. cuDNN before 9.8, which torch 2.7 brings, cannot plan for a card that is not
there: its convolutions count no workspace. Seconds are of a shared machine with two cores.

Made by:

```
python -m tests.compatibility --json FILE                                   # in each environment
python -m tests.compatibility --merge FILE... --markdown reports/compatibility.md
```
"""


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _peak(values: Sequence[int]) -> str:
    return f"{max(values) / MIB:,.1f}" if values and max(values) else "-"


def _line(row: Run) -> str:
    result = RESULTS[row["result"]]
    note = row["note"] if row["result"] not in ("works", "missing") else ""
    if row["result"] in ("fails", "values") and (why := items()[row["key"]].why):
        note = f"{why} ({note})"
    cells = [
        row["name"],
        row["what"],
        f"{result}: {note}" if note else result,
        _peak(row["allocated"]),
        _peak(row["reserved"]),
        ", ".join(f"`{name}`" for name in row["invented"]) or "none",
        f"{row['seconds']:.1f}",
    ]
    return "| " + " | ".join(map(_cell, cells)) + " |"


def counts(run: Run) -> Counter[str]:
    """Count the results of one environment."""
    return Counter(row["result"] for row in run["rows"])


def summary(run: Run) -> str:
    """Say in one line how many items came to which end."""
    found = counts(run)
    parts = [f"{found[kind]} {name.strip('*')}" for kind, name in RESULTS.items() if found[kind]]
    return f"torch {run['torch']}: {len(run['rows'])} items, " + ", ".join(parts)


def _section(run: Run) -> list[str]:
    lines = [f"## torch {run['torch']}", "", summary(run) + ".", ""]
    if run["packages"]:
        lines += ["With " + ", ".join(run["packages"]) + ".", ""]
    invented = Counter(name for row in run["rows"] for name in row["invented"])
    if invented:
        named = ", ".join(f"`{name}` ({count})" for name, count in invented.most_common())
        lines += [f"Functions whose results were invented, and in how many items: {named}.", ""]
    area = ""
    for row in run["rows"]:
        if row["area"] != area:
            area = row["area"]
            lines += [
                "" if lines[-1].startswith("|") else None,  # type: ignore[list-item]
                f"### {area}",
                "",
                "| item | what ran | result | peak allocated, MiB | peak reserved, MiB "
                "| invented | seconds |",
                "| --- | --- | --- | ---: | ---: | --- | ---: |",
            ]
        lines.append(_line(row))
    return [line for line in lines if line is not None]


def markdown(runs: Sequence[Run]) -> str:
    """Write the page: what differs between the environments first, then a table for each."""
    lines = [_HEAD, *(f"- {summary(run)}" for run in runs), ""]
    for run in runs:
        lines += [*_section(run), ""]
    return "\n".join(lines).rstrip() + "\n"
