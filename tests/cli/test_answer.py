"""The answer on a terminal."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rich.console import Console

from memfit.cli.answer import render_answer, trial_line
from memfit.report import words
from tests import sample

if TYPE_CHECKING:
    from memfit.records import ProbeResult


def shown(result: ProbeResult, **options: Any) -> str:
    stream = io.StringIO()
    render_answer(result, Console(file=stream, width=80, **options))
    return stream.getvalue()


def row(text: str, name: str) -> str:
    line = next(line for line in text.splitlines() if line.startswith(name))
    return line.removeprefix(name).strip()


def test_the_first_words_are_the_answer() -> None:
    told = " ".join(shown(sample.gpt2()).split())
    assert told.startswith(words.answer(sample.gpt2()))


def test_the_table_has_the_figures_of_the_answer() -> None:
    text = shown(sample.gpt2())
    assert row(text, "microbatch") == "20"
    assert row(text, "accumulation steps") == "24"
    assert row(text, "logical batch").startswith("480 = 20")
    assert row(text, "peak allocated") == "21.13 GiB virtual"
    assert row(text, "limit") == "23.05 GiB, and the device has 23.55 GiB"
    assert row(text, "headroom left").startswith("1.27 GiB virtual, and 512.00 MiB more")


def test_a_virtual_answer_says_where_its_figures_come_from() -> None:
    assert row(shown(sample.gpt2()), "figures are").startswith("virtual: NVIDIA GeForce RTX 4090")


def test_a_measured_answer_does_not_say_virtual() -> None:
    assert "virtual" not in shown(sample.on_cpu())


def test_what_was_not_measured_is_said_to_be_so() -> None:
    assert row(shown(sample.on_cpu()), "peak allocated") == "not measured"


def test_the_certificate_and_the_notes_follow() -> None:
    told = " ".join(shown(sample.with_hole()).split())
    assert words.certificate(sample.with_hole()) in told
    assert "note: Memory is not monotone here" in told


def test_no_line_is_wider_than_the_terminal() -> None:
    for result in (sample.gpt2(), sample.on_cpu(), sample.with_hole(), sample.hostile()):
        assert max(len(line) for line in shown(result).splitlines()) <= 80


def test_there_are_no_escape_codes_without_colour() -> None:
    assert "\x1b" not in shown(sample.gpt2())


def test_colour_changes_no_word() -> None:
    coloured = shown(sample.gpt2(), force_terminal=True, color_system="truecolor")
    assert "\x1b" in coloured
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == shown(sample.gpt2())


def test_brackets_in_names_are_not_read_as_markup() -> None:
    result = sample.gpt2()
    odd = replace(result, notes=("[red]not colour[/red]",))
    assert "[red]not colour[/red]" in shown(odd)


def test_the_line_of_a_trial_is_the_one_of_the_report() -> None:
    trial = sample.gpt2().trials[0]
    assert trial_line(trial) == words.trial_line(trial)
