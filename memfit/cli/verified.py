"""A verification on a terminal: the answer and its findings on stdout, progress on stderr."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from memfit.report import verified as words
from memfit.verification import Outcome
from memfit.verify.catalogue import CATALOGUE
from memfit.verify.findings import find_page

if TYPE_CHECKING:
    from rich.console import Console

    from memfit.verification import Finding, Verification
    from memfit.verify.catalogue import Page

_STYLES = {"error": "bold red", "warning": "bold yellow", "remark": "bold cyan"}
_ANSWERS = {Outcome.EQUAL: "bold green", Outcome.DIFFERENT: "bold red", Outcome.UNKNOWN: "bold"}

_KEPT = "note: "
"""How a sentence begins that stays when the next one is told."""


class Telling:
    """Progress: a live line on a terminal, a line for each step elsewhere."""

    def __init__(self, console: Console, *, quiet: bool) -> None:
        """Tell on `console`; `quiet` tells nothing."""
        self._console = console
        self._quiet = quiet
        self._status = console.status("starting") if console.is_terminal and not quiet else None

    def __enter__(self) -> Self:
        """Begin the live line."""
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(self, *exception: object) -> None:
        """Take the live line away."""
        if self._status is not None:
            self._status.stop()

    def __call__(self, sentence: str) -> None:
        """Tell what is being done."""
        if self._status is not None and sentence.startswith(_KEPT):
            self._console.print(Text(sentence))
        elif self._status is not None:
            self._status.update(Text(sentence))
        elif not self._quiet:
            self._console.print(Text(sentence), soft_wrap=True)


def render_verification(made: Verification, console: Console) -> None:
    """Print a verification: the answer, its facts, comparisons, findings and notes."""
    console.print(Text(words.answer(made), style=_ANSWERS[made.outcome]))
    console.print()
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in words.rows(made):
        table.add_row(Text(name), Text(value))
    console.print(table)
    if made.comparisons:
        console.print()
        console.print(_comparisons(made))
    for found in made.findings:
        console.print()
        _print_finding(found, console)
    for note in made.notes:
        console.print(Padding(Text(f"note: {note}"), (1, 0, 0, 0)))


def _comparisons(made: Verification) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("microbatches", overflow="fold")
    table.add_column("in", no_wrap=True)
    for name in ("gradient off by", "tolerance", "after one step"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for compared in made.comparisons:
        table.add_row(
            words.split(compared),
            compared.dtype,
            words.error(compared.error),
            words.error(compared.tolerance),
            words.error(compared.step_error),
            Text(words.verdict(compared), "green" if compared.equal else "red"),
        )
    return table


def _print_finding(found: Finding, console: Console) -> None:
    severity = str(found.severity)
    said = " (accepted)" if found.accepted else ""
    console.print(
        Text.assemble((f"{found.code} {severity}{said}: ", _STYLES[severity]), found.title)
    )
    if found.place is not None:
        console.print(
            Padding(Text.assemble((f"{found.place}  ", "bold"), (found.place.code, "dim")), (0, 2))
        )
    console.print(Padding(Text(found.evidence), (0, 2)))
    console.print(Padding(Text(f"to do: {found.remedy}"), (0, 2)))


def render_pages(code: str, console: Console) -> None:
    """Print the page of one code, or of all of them."""
    if code.strip().lower() == "all":
        for page in CATALOGUE.values():
            console.print(
                Text.assemble(
                    (f"{page.code} ", "bold"),
                    (f"{page.severity}", _STYLES[str(page.severity)]),
                    f"  {page.title}",
                )
            )
        return
    _print_page(find_page(code), console)


def _print_page(page: Page, console: Console) -> None:
    severity = str(page.severity)
    console.print(Text.assemble((f"{page.code} {severity}: ", _STYLES[severity]), page.title))
    console.print(Padding(Text(page.meaning), (1, 0, 0, 0)))
    console.print(Padding(Text(f"To do: {page.remedy}."), (1, 0, 0, 0)))
    if page.example:
        console.print(Padding(Text(page.example), (1, 0, 0, 4)))
