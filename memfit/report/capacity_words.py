"""Sentences about a capacity plan, shared by its page and the terminal; plain text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from memfit.capacity.table import CellStatus
from memfit.records import DeviceKind
from memfit.report import words
from memfit.report.words import TIMES

if TYPE_CHECKING:
    from memfit.capacity.table import (
        CapacityCell,
        CapacitySpec,
        CapacityTable,
        Needed,
        PeakFit,
        Setting,
        Tried,
    )

STATUSES = {
    CellStatus.FITS: "fits",
    CellStatus.NOTHING_FITS: "nothing fits",
    CellStatus.FAILED: "failed",
    CellStatus.CANNOT_JUDGE: "not decided",
    CellStatus.NOT_PROBED: "not probed",
}
VIRTUAL_EXPLANATION = (
    "These figures are virtual. PyTorch's own CUDA build and its caching allocator ran the "
    "workload for every cell, but over a stand-in driver: no kernel was executed and no such card "
    "was used. Confirm a choice on the real card where the last few hundred MiB matter."
)
BY_MEMORY = (
    "Smallest is by memory, as the card's driver reports it; the catalogue knows no prices. Cards "
    "were asked from the least memory upwards, and none was skipped."
)
FIT_EXPLANATION = (
    "The line goes through the allocated peaks of the sizes that fitted, by least squares. It "
    "describes them and decides nothing: kernels and the allocator are not affine, which is what "
    "the residual shows."
)


def varied(table: CapacityTable) -> tuple[str, ...]:
    """Names of what the rows differ in: parameters, `precision`, `replicas`."""
    return names_of(table.spec)


def names_of(spec: CapacitySpec) -> tuple[str, ...]:
    """Names of what the rows of a question differ in."""
    rows = spec.settings
    names = [n for n in rows[0].parameters if len({r.parameters[n] for r in rows}) > 1]
    if len({row.precision for row in rows}) > 1:
        names.append("precision")
    if len({row.replicas for row in rows}) > 1:
        names.append("replicas")
    return tuple(names)


def value(setting: Setting, name: str) -> str:
    """Write one value of a setting."""
    if name == "precision":
        return str(setting.precision)
    return str(setting.replicas) if name == "replicas" else setting.parameters[name]


def setting(table: CapacityTable, row: Setting) -> str:
    """Name a row by what it differs in: `seq_len 1024, bf16`."""
    return listed(row, varied(table)) or "the workload as it is"


def listed(row: Setting, names: Sequence[str]) -> str:
    """Write the named values of a setting."""
    parts = []
    for name in names:
        if name == "precision":
            parts.append(str(row.precision))
        elif name == "replicas":
            parts.append(words.number(row.replicas, "replica"))
        else:
            parts.append(f"{name} {row.parameters[name]}")
    return ", ".join(parts)


def fixed(table: CapacityTable) -> str:
    """Say what all cells have in common: `fp32, logical batch 512`."""
    spec, row = table.spec, table.spec.settings[0]
    names = [n for n in (*row.parameters, "precision") if n not in varied(table)]
    parts = [listed(row, names)] if names else []
    if "replicas" not in varied(table) and row.replicas > 1:
        parts.append(words.number(row.replicas, "replica"))
    logical = spec.logical_batch
    parts.append("no logical batch" if logical is None else f"logical batch {logical:,}")
    return ", ".join(parts)


def headline(table: CapacityTable) -> str:
    """Say the answer of a plan in one sentence."""
    if table.needed:
        return needed(table, table.needed[0]) if len(table.needed) == 1 else _needs(table)
    cells = table.matrix
    fits = [cell for cell in cells if cell.status is CellStatus.FITS]
    virtual = "virtual " if table.is_virtual else ""
    where = f"{words.number(len(cells), f'{virtual}cell')} of {table.workload.name}"
    if not fits:
        return f"Nothing fits in any of the {where}."
    best = max(fits, key=lambda c: (c.microbatch or 0, -c.device.total_bytes, -c.index))
    least = min(fits, key=lambda c: (c.microbatch or 0, c.index))
    out = len(cells) - len(fits)
    rest = f"; {words.number(out, 'cell')} without an answer" if out else ""
    if len(fits) == 1:
        return f"{where}: microbatch {best.microbatch} on {_where(table, best)}{rest}."
    if best.microbatch == least.microbatch:
        return f"{where}: microbatch {best.microbatch} wherever there is an answer{rest}."
    return (
        f"{where}: from microbatch {least.microbatch} on {_where(table, least)} "
        f"to {best.microbatch} on {_where(table, best)}{rest}."
    )


def _where(table: CapacityTable, cell: CapacityCell) -> str:
    told = listed(cell.setting, varied(table))
    return cell.device.slug + (f" ({told})" if told else "")


def _needs(table: CapacityTable) -> str:
    found = [need for need in table.needed if need.device is not None]
    m = table.spec.need
    if not found:
        return f"Microbatch {m} fits on none of the devices in any of the settings."
    most = max(found, key=lambda need: _bytes(table, need))
    word = "virtual " if table.is_virtual else ""
    if len(found) == len(table.needed):
        return f"Microbatch {m} fits in every setting from the {word}{most.device} on."
    return f"Microbatch {m} fits in {len(found)} of {len(table.needed)} settings."


def _bytes(table: CapacityTable, need: Needed) -> int:
    return 0 if need.cell is None else table.cell(need.cell).device.total_bytes


def needed(table: CapacityTable, need: Needed) -> str:
    """Say on which device a microbatch fits, and why not on the next smaller one."""
    row = listed(need.setting, varied(table))
    told = f"{row}: " if row else ""
    if need.cell is None:
        return f"{told}microbatch {need.microbatch} fits on none of these devices."
    cell = table.cell(need.cell)
    text = (
        f"{told}the smallest device for microbatch {need.microbatch} is {cell.device.slug}, "
        f"peak {words.size(cell.peak_bytes)} of {limit(cell)}"
    )
    if need.alike:
        text += f"; so {'do' if len(need.alike) > 1 else 'does'} {words.listing(need.alike)}, "
        text += "of about the same memory"
    if need.undecided:
        slugs = [table.cell(index).device.slug for index in need.undecided]
        text += f"; {words.listing(slugs)} could not be judged"
    return f"{text}."


def below(table: CapacityTable, need: Needed) -> str:
    """Say what the next smaller device showed; empty where there is none."""
    if need.below is None:
        return ""
    cell = table.cell(need.below)
    if cell.microbatch is None:
        return f"{cell.device.slug}: {cell.message}."
    return (
        f"{cell.device.slug}: only microbatch {cell.microbatch} was certified, "
        f"peak {words.size(cell.peak_bytes)} of {limit(cell)}."
    )


def limit(cell: CapacityCell) -> str:
    """Write a cell's limit, with the word where it is a virtual device's."""
    virtual = " (virtual)" if cell.device.kind is DeviceKind.VIRTUAL else ""
    return f"{words.size(cell.device.limit_bytes)}{virtual}"


def split(cell: CapacityCell) -> str:
    """Write the split of a cell as a calculation; empty where there is none."""
    if cell.split is None:
        return ""
    if cell.split.logical_batch is None:
        return f"{cell.split.microbatch} {TIMES} A {TIMES} {cell.split.replicas}"
    return words.arithmetic(cell.split)


def short_split(cell: CapacityCell) -> str:
    """Write `m x A x D` alone."""
    return split(cell).partition(" = ")[0]


def dominant(cell: CapacityCell) -> str:
    """Name the largest part of the peak and its share of the allocated bytes."""
    made = cell.composition
    if made is None:
        return "" if cell.status is not CellStatus.FITS else words.NOT_MEASURED
    most = max(
        made.baseline_bytes,
        made.parameters_bytes,
        made.buffers_bytes,
        made.gradients_bytes,
        made.optimizer_state_bytes,
        made.activations_bytes,
    )
    return f"{made.dominant} {round(100 * most / made.total_bytes)}\N{NO-BREAK SPACE}%"


def tried(table: CapacityTable, base: CapacityCell, one: Tried) -> str:
    """Say what one change brought: `bf16: 8 instead of 4`."""
    cell = table.cell(one.cell)
    if cell.microbatch is None:
        return f"{one.change}: {STATUSES[cell.status]}"
    if base.microbatch is None:
        return f"{one.change}: {cell.microbatch} instead of nothing"
    if cell.microbatch != base.microbatch:
        return f"{one.change}: {cell.microbatch} instead of {base.microbatch}"
    if cell.peak_bytes is None or base.peak_bytes is None:
        return f"{one.change}: {cell.microbatch} as before"
    change = cell.peak_bytes - base.peak_bytes
    if change == 0:
        return f"{one.change}: no change"
    less = "less" if change < 0 else "more"
    return f"{one.change}: {cell.microbatch} as before, {words.size(abs(change))} {less}"


def advice(table: CapacityTable) -> str | None:
    """Say what was not tried and may help; None where something was tried."""
    made = [c.composition for c in table.matrix if c.composition is not None]
    if table.spec.tries or table.spec.need is not None or not made:
        return None
    names = [part.dominant for part in made]
    most = max(dict.fromkeys(names), key=names.count)
    helps = REMEDIES.get(most)
    if helps is None:
        return None
    where = f"in {names.count(most)} of {len(names)} cells"
    verb = "dominate" if most.endswith("s") else "dominates"
    return f"{most} {verb} {where}; {helps}"


REMEDIES = {
    "activations and temporaries": "--try checkpointing,precision,allocator measures what would "
    "buy room",
    "parameters": "16-bit parameters, or a model sharded over GPUs, would buy room; neither was "
    "measured",
    "gradients": "freezing parameters or sharding over GPUs would buy room; neither was measured",
    "optimizer state": "an optimizer with less state, or one sharded over GPUs, would buy room; "
    "neither was measured",
}


def line(fit: PeakFit) -> str:
    """Write a fitted line: `2.26 GiB + 947.01 MiB x m`."""
    sign = "+" if fit.slope_bytes >= 0 else "-"
    slope = words.size(abs(fit.slope_bytes))
    return f"{words.size(fit.intercept_bytes)} {sign} {slope} {TIMES} m"


def residual(fit: PeakFit) -> str:
    """Write the largest distance from the line, and where it is."""
    if fit.points <= 2:  # noqa: PLR2004 - two points are always on their line
        return "two points only"
    return f"{words.size(fit.residual_bytes)} at {fit.residual_microbatch}"


def cell_line(table_names: Sequence[str], cell: CapacityCell) -> str:
    """Write one finished cell as one line of progress.

    The line says `virtual` where the figures are, since it may be read alone.
    """
    what = [cell.device.slug, listed(cell.setting, table_names)]
    if cell.change and cell.change != "bf16":
        what.append(cell.change)
    name = ", ".join(part for part in what if part)
    took = words.duration(cell.wall_s)
    if cell.status is CellStatus.FITS:
        told = (
            f"microbatch {short_split(cell)}, peak {words.size(cell.peak_bytes)} of {limit(cell)}"
        )
    else:
        told = f"{STATUSES[cell.status]}: {cell.message}"
    return f"{name}: {told}  {took}"


def tried_above(cell: CapacityCell) -> str:
    """Name the sizes above the answer that did not fit, the nearest first, or say why none."""
    given = cell.certificate
    if given is None:
        return ""
    above = sorted(given.tried_above, key=lambda tried: tried.microbatch)
    parts = [f"{tried.microbatch} {words.verdict(tried.verdict)}" for tried in above[:3]]
    if len(above) > len(parts):
        parts.append(f"{len(above) - len(parts)} more")
    if given.ceiling == "cap":
        parts.append("no larger size" if given.cap is None else f"{given.cap} is the cap")
    elif given.ceiling in ("budget", "time"):
        parts.append("larger ones were not all tried")
    return ", ".join(parts)
