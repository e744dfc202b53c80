"""`memfit report`: the page of a result, made again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from memfit.cli.manners import stderr, verb
from memfit.errors import UsageError


@verb
def report(
    result: Annotated[Path, typer.Argument(help="A memfit.json or capacity.json, or its folder.")],
    out: Annotated[
        Path | None, typer.Option(help="The page to write; by default beside it.")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace a page that differs from the new one.")
    ] = False,
) -> None:
    """Make the HTML page of a result again."""
    from memfit.capacity.folder import TABLE  # noqa: PLC0415
    from memfit.folder import RESULT, write_whole  # noqa: PLC0415

    if result.is_dir():
        inside = [result / name for name in (RESULT, TABLE) if (result / name).is_file()]
        result = inside[0] if inside else result
    try:
        data = result.read_bytes()
    except OSError as error:
        raise UsageError(
            f"cannot read {result}: {error.strerror}", hint="name a memfit.json or a capacity.json"
        ) from None
    page, name = _page(data, origin=str(result))
    path = out or result.with_name(name)
    if path.is_dir() or not path.parent.is_dir():
        wrong = f"{path} is a folder" if path.is_dir() else f"there is no folder {path.parent}"
        raise UsageError(wrong, hint="name the page to write with --out, in a folder that exists")
    if path.exists() and not force and path.read_bytes() != page:
        raise UsageError(f"{path} exists and differs", hint="use --force to replace it, or --out")
    write_whole(path, page)
    stderr().print(f"wrote {path}", soft_wrap=True)


def _page(data: bytes, *, origin: str) -> tuple[bytes, str]:
    """Make the page of a document, and say how it is named."""
    from memfit.capacity.folder import PAGE  # noqa: PLC0415
    from memfit.capacity.table import CapacityTable  # noqa: PLC0415
    from memfit.folder import REPORT  # noqa: PLC0415
    from memfit.nothing import NothingFound  # noqa: PLC0415
    from memfit.records import NOTHING_FITS, ProbeResult, from_json, schema_of  # noqa: PLC0415
    from memfit.report import render, render_capacity, render_nothing  # noqa: PLC0415

    schema = schema_of(data)
    if schema == NOTHING_FITS:
        return render_nothing(from_json(data, NothingFound, origin=origin)).encode(), REPORT
    if schema == "memfit.capacity":
        return render_capacity(from_json(data, CapacityTable, origin=origin)).encode(), PAGE
    return render(from_json(data, ProbeResult, origin=origin)).encode(), REPORT
