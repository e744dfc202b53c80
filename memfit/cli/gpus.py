"""`memfit gpus`: the catalogue of cards."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from memfit.cli.manners import stdout, verb


@verb
def gpus(
    as_json: Annotated[bool, typer.Option("--json", help="Print the catalogue as JSON.")] = False,
) -> None:
    """List the cards that a virtual GPU can imitate."""
    import dataclasses  # noqa: PLC0415

    from memfit.virtual import cards, context_charge  # noqa: PLC0415

    if as_json:
        document = {
            "schema": "memfit.cards",
            "schema_version": 1,
            "cards": [dataclasses.asdict(card) for card in cards()],
        }
        typer.echo(json.dumps(document, indent=2))
        return
    from rich.table import Table  # noqa: PLC0415

    from memfit.units import format_bytes  # noqa: PLC0415

    table = Table(box=None, pad_edge=False)
    table.add_column("--device", no_wrap=True)
    table.add_column("card")
    table.add_column("memory", justify="right", no_wrap=True)
    table.add_column("compute", justify="right")
    table.add_column("SMs", justify="right")
    table.add_column("context", justify="right", no_wrap=True)
    for card in cards():
        context, _ = context_charge(card)
        estimated = "" if card.context_bytes is not None else " (estimate)"
        table.add_row(
            card.slug,
            card.name,
            format_bytes(card.total_bytes),
            card.compute_capability,
            str(card.sms),
            format_bytes(context) + estimated,
        )
    stdout().print(table)
