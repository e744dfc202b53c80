"""The answer on a terminal: a short table on stdout, and a line for each trial on stderr."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from memfit.report import staying, verified, words
from memfit.report.words import trial_line

if TYPE_CHECKING:
    from rich.console import Console

    from memfit.records import ProbeResult

__all__ = ["render_answer", "trial_line"]


def render_answer(result: ProbeResult, console: Console) -> None:
    """Print the answer: a sentence, a table of its figures, why it holds, and notes.

    Args:
        result: The answer, with all trials.
        console: Where to print; nothing depends on its colours.
    """
    console.print(_stressed(words.answer(result), style="bold"))
    console.print()
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in _rows(result):
        table.add_row(Text(name), _stressed(value))
    console.print(table)
    console.print()
    console.print(Text(words.certificate(result)))
    steady = staying.steadiness(result)
    if steady:
        style = "bold red" if staying.grows(result) else ""
        console.print(Padding(Text(steady, style=style), (1, 0, 0, 0)))
    more = (staying.needed_setting(result), staying.tuned(result), staying.evaluation(result))
    for sentence in more:
        if sentence:
            console.print(Padding(_stressed(sentence), (1, 0, 0, 0)))
    for note in _notes(result):
        console.print(Padding(Text(f"note: {note}"), (1, 0, 0, 0)))


def _rows(result: ProbeResult) -> list[tuple[str, str]]:
    """Name and value of each row."""
    split, answer, device = result.split, result.answer, result.spec.device
    logical = split.logical_batch
    asked = "none was asked for" if logical is None else f"{logical:,} = {_product(result)}"
    note = " virtual" if words.is_virtual(result) else ""

    def told(value: int | None) -> str:
        return words.size(value) + ("" if value is None else note)

    left = told(words.headroom_left(result))
    if device.headroom_bytes:
        left += f", and {words.size(device.headroom_bytes)} more kept free on purpose"
    total = words.size(device.total_bytes)
    trials = words.number(len(result.trials) + len(result.other_trials), "trial")
    return [
        ("microbatch", str(split.microbatch)),
        ("accumulation steps", str(split.accumulation_steps)),
        ("replicas", str(split.replicas)),
        ("logical batch", asked),
        ("peak allocated", told(answer.peak_allocated_bytes)),
        ("peak reserved", told(answer.peak_reserved_bytes)),
        ("device used", told(words.device_used(answer))),
        ("limit", f"{words.size(device.limit_bytes)}, and the device has {total}"),
        ("headroom left", left),
        ("ceiling set by", words.ceiling(result)),
        ("search", f"{trials} in {words.duration(result.wall_s)}"),
        ("figures are", words.source(result)),
        ("accumulation", verified.of_probe(result)),
    ]


def _product(result: ProbeResult) -> str:
    return words.arithmetic(result.split).rsplit(" = ", 1)[0]


def _notes(result: ProbeResult) -> list[str]:
    made = (words.split_note(result), words.hole_sentence(result))
    return [*(note for note in made if note), *result.notes, *result.answer.limits]


def _stressed(text: str, *, style: str = "") -> Text:
    """Colour the word `virtual`; the text is never read as markup."""
    made = Text(text, style=style)
    made.highlight_regex(r"\bvirtual\b", "bold magenta")
    return made
