"""A capacity plan as a table of comma-separated values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memfit.capacity.table import CapacityCell, CapacityTable

BEFORE = ("cell", "device_slug", "device_name", "source", "device_total_bytes", "limit_bytes")
AFTER = (
    "precision",
    "replicas",
    "change",
    "base_cell",
    "status",
    "microbatch",
    "accumulation_steps",
    "logical_batch",
    "ceiling",
    "answer_trial",
    "trials",
    "peak_allocated_bytes",
    "peak_bytes",
    "headroom_left_bytes",
    "parameters_bytes",
    "buffers_bytes",
    "gradients_bytes",
    "optimizer_state_bytes",
    "activations_bytes",
    "dominant",
    "fit_points",
    "fit_intercept_bytes",
    "fit_slope_bytes",
    "fit_residual_bytes",
    "fit_residual_microbatch",
    "wall_s",
    "folder",
    "command",
    "message",
)
"""Columns before and after those of the parameters, which are named `set_NAME`."""
_OF_COMPOSITION = (
    "parameters_bytes",
    "buffers_bytes",
    "gradients_bytes",
    "optimizer_state_bytes",
    "activations_bytes",
)


def capacity_csv(table: CapacityTable) -> str:
    """Write the cells of a plan as CSV, one row each; an empty cell was not measured."""
    import pandas as pd  # noqa: PLC0415 - heavy, and needed for this file only

    names = list(dict.fromkeys(n for cell in table.cells for n in cell.setting.parameters))
    columns = [*BEFORE, *(f"set_{name}" for name in names), *AFTER]
    rows = [_row(cell) for cell in table.cells]
    # Whole numbers stay whole beside empty cells only as objects: pandas' own would be floats.
    frame = pd.DataFrame(rows, columns=columns, dtype=object)
    return str(frame.to_csv(index=False, lineterminator="\n"))


def _row(cell: CapacityCell) -> dict[str, Any]:
    row: dict[str, Any] = {
        "cell": cell.index,
        "device_slug": cell.device.slug,
        "device_name": cell.device.name,
        "source": cell.source.value if cell.source else None,
        "device_total_bytes": cell.device.total_bytes,
        "limit_bytes": cell.device.limit_bytes,
        **{f"set_{name}": value for name, value in cell.setting.parameters.items()},
        "precision": cell.setting.precision.value,
        "replicas": cell.setting.replicas,
        "change": cell.change,
        "base_cell": cell.base,
        "status": cell.status.value,
        "microbatch": cell.microbatch,
        "trials": len(cell.points),
        "peak_allocated_bytes": cell.peak_allocated_bytes,
        "peak_bytes": cell.peak_bytes,
        "headroom_left_bytes": cell.headroom_left_bytes,
        "wall_s": cell.wall_s,
        "folder": cell.folder,
        "command": cell.command,
        "message": cell.message,
    }
    if cell.split is not None and cell.certificate is not None:
        row["accumulation_steps"] = cell.split.accumulation_steps
        row["logical_batch"] = cell.split.logical_batch
        row["ceiling"] = cell.certificate.ceiling
        row["answer_trial"] = cell.certificate.trial
    if cell.composition is not None:
        row.update({name: getattr(cell.composition, name) for name in _OF_COMPOSITION})
        row["dominant"] = cell.composition.dominant
    if cell.fit is not None:
        row["fit_points"] = cell.fit.points
        row["fit_intercept_bytes"] = cell.fit.intercept_bytes
        row["fit_slope_bytes"] = cell.fit.slope_bytes
        row["fit_residual_bytes"] = cell.fit.residual_bytes if cell.fit.points > 2 else None  # noqa: PLR2004
        row["fit_residual_microbatch"] = cell.fit.residual_microbatch
    return row
