"""`memfit gpus`: the catalogue of cards, one of them in full, or the card of this machine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from memfit.cli.manners import stderr, stdout, verb
from memfit.errors import CannotJudge, UsageError

if TYPE_CHECKING:
    from memfit.virtual import Card
    from memfit.virtual.card_file import CardReading

_PATIENCE_S = 300
"""Longest time that importing torch and creating a CUDA context may take."""


@verb
def gpus(
    card: Annotated[
        str | None,
        typer.Argument(help="Show every figure of this card and its source; a card file too."),
    ] = None,
    from_this_machine: Annotated[
        bool,
        typer.Option("--from-this-machine", help="Describe this machine's own GPU as a card file."),
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(help="Write the card file here instead of to stdout."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace that file.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the catalogue as JSON.")] = False,
) -> None:
    """List the cards that a virtual GPU can imitate."""
    from memfit.virtual import cards, find_card  # noqa: PLC0415

    if from_this_machine:
        if card is not None:
            raise UsageError(
                f"--from-this-machine reads this machine's GPU, and {card!r} names another",
                hint="leave one of them out",
            )
        _write_own(out, force=force)
        return
    if out is not None or force:
        raise UsageError(
            f"{'--out' if out is not None else '--force'} is for --from-this-machine",
            hint="to keep the catalogue: memfit gpus --json > cards.json",
        )
    chosen = None if card is None else find_card(card)
    if as_json:
        listed = cards() if chosen is None else (chosen,)
        document = {
            "schema": "memfit.cards",
            "schema_version": 1,
            "cards": [_told(each) for each in listed],
        }
        typer.echo(json.dumps(document, indent=2))
    elif chosen is None:
        _print_all(cards())
    else:
        _print_one(chosen)


def _told(card: Card) -> dict[str, Any]:
    """Write a card with where each figure comes from."""
    import dataclasses  # noqa: PLC0415

    from memfit.units import MIB  # noqa: PLC0415
    from memfit.virtual.catalogue import LATER_KERNELS_MIB, context_of  # noqa: PLC0415

    document = dataclasses.asdict(card)
    document["source"] = card.source
    document["context"] = {
        **dataclasses.asdict(context_of(card)),
        "later_kernels_bytes": [mib * MIB for mib in LATER_KERNELS_MIB],
    }
    return document


def _print_all(listed: tuple[Card, ...]) -> None:
    from rich.table import Table  # noqa: PLC0415

    from memfit.units import MIB, format_bytes  # noqa: PLC0415
    from memfit.virtual import context_charge  # noqa: PLC0415

    # Eighty columns are enough: makers are left out, and an estimate has a mark.
    table = Table(box=None, pad_edge=False)
    table.add_column("--device", no_wrap=True)
    table.add_column("card")
    table.add_column("memory", justify="right", no_wrap=True)
    table.add_column("compute", justify="right")
    table.add_column("SMs", justify="right")
    table.add_column("context", justify="right", no_wrap=True)
    for card in listed:
        context, _ = context_charge(card)
        mark = "" if card.context_bytes is not None else "~"
        table.add_row(
            card.slug,
            card.name.removeprefix("NVIDIA "),
            format_bytes(card.total_bytes),
            card.compute_capability,
            str(card.sms),
            f"{mark}{context / MIB:.0f} MiB",
        )
    out = stdout()
    out.print(table)
    out.print("~ an estimate; `memfit gpus CARD` shows where each figure comes from")


def _print_one(card: Card) -> None:
    """Print every figure of a card, and where it comes from."""
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    from memfit.units import format_bytes  # noqa: PLC0415
    from memfit.virtual.catalogue import LATER_KERNELS_MIB, context_of  # noqa: PLC0415

    context = context_of(card)
    least, most = LATER_KERNELS_MIB
    charged = format_bytes(context.charged_bytes)
    if not context.read:
        charged += f" (estimate, {format_bytes(context.low_bytes)} to "
        charged += f"{format_bytes(context.high_bytes)})"
    sources = card.sources
    rows = [
        (
            "memory",
            f"{format_bytes(card.total_bytes)} ({card.total_bytes:,} bytes)",
            f"{sources.total}; driver: {sources.total_driver}",
        ),
        ("  other readings", "", sources.total_others),
        ("compute", card.compute_capability, "the file" if card.file else "NVIDIA's specification"),
        ("multiprocessors", str(card.sms), sources.sms),
        ("shared memory", f"{card.smem_per_sm_bytes:,} bytes each", sources.shared_memory),
        ("  for one block", f"{card.smem_optin_bytes:,} bytes", sources.shared_memory),
        ("L2 cache", format_bytes(card.l2_bytes), sources.l2),
        ("CUDA context", charged, context.source),
        ("  grows", f"by {least} to {most} MiB", "kernels that a training run loads; not charged"),
    ]
    title = card.shown_name
    if card.file is None:
        title = f"{card.name}: --device {card.slug}"
        title += f", also {', '.join(card.aliases)}" if card.aliases else ""
    console = stdout()
    console.print(Text(title, style="bold"), soft_wrap=True)
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("figure", no_wrap=True)
    table.add_column("value")
    table.add_column("source", overflow="fold")
    for name, value, source in rows:
        table.add_row(Text(name), Text(value), Text(source))
    console.print(table)


# -- the card of this machine ----------------------------------------------------------------


def _write_own(out: Path | None, *, force: bool) -> None:
    from memfit.folder import write_whole  # noqa: PLC0415
    from memfit.virtual.card_file import parse_card, write_card  # noqa: PLC0415

    if out is not None and out.is_dir():
        raise UsageError(f"{out} is a folder", hint="name a file, such as card.json")
    if out is not None and not out.parent.is_dir():
        raise UsageError(f"there is no folder {out.parent}", hint="make it, or name another")
    if out is not None and out.exists() and not force:
        raise UsageError(f"{out} exists", hint="use --force to replace it, or another --out")
    reading = _read_own()
    text = write_card(reading)
    try:
        parse_card("of this machine", text.encode())
    except UsageError as error:
        raise CannotJudge(
            f"no virtual GPU can imitate this machine's {reading.name!r}: {error.message}",
            hint="virtual GPUs have compute capability 7.0 or later",
        ) from None
    if out is None:
        typer.echo(text, nl=False)
    else:
        write_whole(out, text.encode())
        stderr().print(f"wrote {out}: {reading.name}", soft_wrap=True)
    if reading.read_from == "virtual":
        stderr().print(
            "warning: this GPU is virtual, and the file says so: it describes no real card",
            soft_wrap=True,
        )


def _read_own() -> CardReading:
    """Ask CUDA for its card in a process of its own: this one never touches CUDA."""
    import msgspec  # noqa: PLC0415

    from memfit.devices.select import torch_has_cuda  # noqa: PLC0415
    from memfit.virtual.card_file import CardReading  # noqa: PLC0415

    hint = "run it on the machine with the GPU; `memfit doctor` says what is found here"
    if not torch_has_cuda():
        raise CannotJudge("the installed torch is no CUDA build, which reads the GPU", hint=hint)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "memfit.selftest"],
            check=False,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_PATIENCE_S,
        )
        answer = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        raise CannotJudge(f"CUDA did not answer in {_PATIENCE_S} s", hint=hint) from None
    except (json.JSONDecodeError, IndexError):
        raise CannotJudge(
            f"asking CUDA for its card ended with exit status {done.returncode}",
            hint=hint,
            details=done.stderr or None,
        ) from None
    if "failure" in answer:
        raise CannotJudge(f"there is no GPU to read here: {answer['failure']}", hint=hint)
    return msgspec.convert(answer, CardReading)
