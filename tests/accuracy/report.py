"""From comparisons to `accuracy.md`."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence

from tests.accuracy.ladder import CONTEXTS, DESCENDING, KNOWN, RUNS, TODAY, TOTAL_BYTES, unlike
from tests.accuracy.ladder import NAME as LADDER
from tests.accuracy.rows import ALLOCATED, RESERVED, Result, Row

MIB = 2**20
_NEARLY_NOTHING = 1e-7


def markdown(results: Sequence[Result], *, versions: Sequence[str], command: str) -> str:
    """Write the report."""
    parts = [_head(versions, command)]
    names = list(dict.fromkeys(result.data_set for result in results))
    for name in names:
        here = [result for result in results if result.data_set == name]
        parts.append(_ladder(name, here) if name == LADDER else _bytes(name, here))
    return "\n".join(parts).rstrip() + "\n"


def _head(versions: Sequence[str], command: str) -> str:
    lines = "\n".join(f"- {version}" for version in versions)
    return f"""# Accuracy of the virtual GPU

Every figure under *virtual* was made by a **virtual GPU**: PyTorch's CUDA build and its real
caching allocator over a stand-in driver whose kernels do nothing. Every figure under *measured* was
published by other people, who ran real cards. The model code is this project's own, written from
the published operations and from what the authors' scripts do: where these leave an operator's
details open (copies, lifetimes, what earlier rows left alive), they were settled by looking at its
figures, in places at several of its rows, so operator rows are no blind test. No constant of memfit
was fitted to a row.

Run with:

{lines}

Regenerate with:

```
{command}
```

"Exact" is equal to the last byte or, where fewer digits were published, to the last digit.
"""


# -- data sets in bytes --------------------------------------------------------------------------


def _bytes(name: str, results: Sequence[Result]) -> str:
    rows = [row for result in results for row in result.rows]
    lines = [f"\n## {name}\n"]
    lines += [f"- {note}" for note in dict.fromkeys(n for r in results for n in r.notes)]
    if not rows:
        return "\n".join(lines)
    lines += [
        "\n| torch | figure | rows | exact | median error | p95 | largest |",
        "|---|---|---|---|---|---|---|",
    ]
    for torch in dict.fromkeys(row.torch for row in rows):
        lines += _summary(torch, [row for row in rows if row.torch == torch])
    nearest = list(_nearest(rows))
    if len({row.torch for row in rows}) > 1:
        lines += _summary("**nearest to the recorded one**", nearest)
    sequences = {
        (row.label, row.torch): row.same_sequence for row in rows if row.same_sequence is not None
    }
    for torch in dict.fromkeys(torch for _, torch in sequences):
        same = [value for (_, other), value in sequences.items() if other == torch]
        lines.append(
            f"\nAllocation sizes, torch {torch}: identical in order in {sum(map(bool, same))} of "
            f"{len(same)} runs."
        )
    lines.append(_off(rows, nearest))
    return "\n".join(lines)


def _nearest(rows: Iterable[Row]) -> Iterable[Row]:
    """Keep, of each figure, the version nearest to the one that recorded it."""
    by_figure = defaultdict(list)
    for row in rows:
        by_figure[row.label, row.metric, row.measured].append(row)
    for same in by_figure.values():
        first = min(abs(_minor(row.torch) - row.recorded) for row in same)
        chosen = [row for row in same if abs(_minor(row.torch) - row.recorded) == first]
        yield from chosen


def _minor(version: str) -> int:
    return int(version.split(".")[1])


def _summary(torch: str, rows: Sequence[Row]) -> list[str]:
    lines = []
    for kind in (ALLOCATED, RESERVED):
        of_kind = [row for row in rows if (row.metric == RESERVED) == (kind == RESERVED)]
        if not of_kind:
            continue
        errors = sorted(abs(row.error) for row in of_kind if row.error is not None)
        exact = sum(row.exact for row in of_kind)
        failed = len(of_kind) - len(errors)
        shown = (
            [_percent(statistics.median(errors)), _percent(_p95(errors)), _percent(errors[-1])]
            if errors
            else ["-"] * 3
        )
        lines.append(
            f"| {torch} | {kind.removeprefix('peak ')} | {len(of_kind)}"
            + (f" ({failed} failed)" if failed else "")
            + f" | {exact} ({100 * exact / len(of_kind):.1f} %) | {' | '.join(shown)} |"
        )
    return lines


def _p95(ordered: Sequence[float]) -> float:
    return ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]


def _percent(share: float) -> str:
    if share < _NEARLY_NOTHING:
        return "0"
    return f"{100 * share:.4f} %"


def _off(rows: Sequence[Row], nearest: Sequence[Row]) -> str:
    good = {(row.label, row.metric, row.measured): row.torch for row in nearest if row.exact}
    off = [row for row in rows if not row.exact]
    if not off:
        return "\nNo row is off."
    lines = ["\n| off | torch | figure | measured | virtual | error | cause |", "|---" * 7 + "|"]
    for row in off:
        exact_with = good.get((row.label, row.metric, row.measured))
        cause = row.cause or "not known"
        if exact_with and exact_with != row.torch:
            cause = f"drift, exact with torch {exact_with}" + (f": {row.drift}" * bool(row.drift))
        found = "-" if row.found is None else f"{row.found:,}"
        error = "failed" if row.error is None else f"{100 * row.error:+.4f} %"
        lines.append(
            f"| {row.label} | {row.torch} | {row.metric} | {row.measured:,} | {found} | {error} | "
            f"{cause} |"
        )
    return "\n".join(lines)


# -- the ladder ----------------------------------------------------------------------------------


def _ladder(name: str, results: Sequence[Result]) -> str:
    lines = [f"\n## {name}\n"]
    lines += [f"- {note}" for note in dict.fromkeys(n for r in results for n in r.notes)]
    tries = [one for result in results for one in result.ladder]
    if not tries:
        return "\n".join(lines)
    main, *others = CONTEXTS
    names = (main, *others, TODAY)
    beside = ", ".join(f"{CONTEXTS[name] // MIB:,} MiB with {name}" for name in others)
    lines += [
        "The largest batch of a ladder that fitted, with torch 1.12 and CUDA 11.3. A random sample "
        f"of each layout, seed 0; a card of {TOTAL_BYTES:,} bytes, as drivers of that time showed "
        "it; no headroom; the models of timm 0.6. A rung *runs* where three steps end without an "
        "out-of-memory error, which is the benchmark's own rule, though some run only by flushing "
        "the allocator's cache in every step: a trial of memfit refuses those.\n",
        f"The card's context is what was read on an RTX 3090 with {main}: "
        f"{CONTEXTS[main] // MIB:,} MiB (pytorch#55277), the reading nearest to the recorded "
        f"version. Beside it: {beside} (pytorch#49877), and {TODAY}, what memfit charges for the "
        "card. With CUDA before 11.7 a context held every kernel of torch from the start, since "
        "then only those that were called; no reading with torch 1.12 was found, and that its "
        "context is like those of 1.7 and 1.8 is an inference.\n",
        "| layout | context | batches that fitted there | run here | of these, flushing | refused "
        "here | next rungs that failed there | fail here | fail or flush here |",
        "|---" * 9 + "|",
    ]
    for layout in dict.fromkeys(str(one["layout"]) for one in tries):
        for context in names:
            here = [one for one in tries if one["layout"] == layout and one[context] != "error"]
            own = [str(one[context]) for one in here if one["fitted_there"]]
            above = [str(one[context]) for one in here if not one["fitted_there"]]
            lines.append(
                f"| {layout} | {context} | {len(own)} | {sum(map(RUNS.count, own))} | "
                f"{own.count('thrash')} | {own.count('oom')} | {len(above)} | "
                f"{_share(above.count('oom'), above)} | "
                f"{_share(len(above) - above.count('fits'), above)} |"
            )
    failed = [one for one in tries if one[main] == "error"]
    lines += [
        f"\n{one['model']}, {one['layout']}, {one['batch']}, did not run: {str(one['error'])[:99]}."
        for one in failed
    ]
    lines += [
        "\nThere, rungs were tried downwards in one process, and a model was still alive while the "
        "next was built. Here each rung has a process of its own; what is unlike the real card is "
        "also shown as it ends when descended to in one process. Only those rows were tried so.",
        "\n| unlike the real card | layout | batch | there | "
        f"{' | '.join(f'context {name}' for name in names)} | "
        f"{main}, in one process | allocated, reserved here, MiB | why |",
        "|---" * (7 + len(names)) + "|",
    ]
    lines += [
        f"| {one['model']} | {one['layout']} | {one['batch']} | "
        f"{'runs' if one['fitted_there'] else 'fails'} | "
        f"{' | '.join(str(one[context]) for context in names)} | {one[DESCENDING]} | "
        f"{_mib(one['allocated'])}, {_mib(one['reserved'])} | {_why(one, main)} |"
        for one in tries
        if unlike(one, main)
    ]
    return "\n".join(lines)


def _share(count: int, of: Sequence[str]) -> str:
    return f"{count} ({100 * count / len(of):.1f} %)" if of else "0"


def _mib(size: object) -> str:
    return f"{int(str(size)) // MIB:,}" if size else "-"


def _why(one: dict[str, object], context: str) -> str:
    """Return the first reason that applies."""
    if (one[DESCENDING] in RUNS) == one["fitted_there"]:
        return "ends as there when descended to: rungs before it in the process decide"
    known = KNOWN.get((str(one["model"]), str(one["layout"]), int(str(one["batch"]))))
    if known:
        return known
    if one["fitted_there"]:
        return f"not known: {one['error'] or 'the larger context'}"
    left = TOTAL_BYTES - CONTEXTS[context]
    parts = [f"{100 * int(str(one['allocated'])) / left:.1f} % of what the context leaves"]
    if one[context] == "thrash":
        parts.append("runs by flushing in every step, which a trial of memfit refuses")
    if int(str(one["other_layout_there"])) >= int(str(one["batch"])):
        parts.append("in the other layout the real card ran this batch")
    return f"not known: {'; '.join(parts)}"
