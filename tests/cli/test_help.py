"""The words of the command line: help for all of them, and none that comes or goes unnoticed."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import typer.main

from memfit import __version__
from memfit.cli import app, main
from memfit.virtual import cards, unavailable_reason
from tests.cli.terminal import PLAIN, memfit

if TYPE_CHECKING:
    from pathlib import Path

OPTIONS = {
    "probe": {
        "target",
        "--set",
        "--device",
        "--memory",
        "--memory-limit",
        "--headroom",
        "--logical-batch/-B",
        "--replicas/-D",
        "--policy",
        "--precision",
        "--clip",
        "--group-microbatches",
        "--allocator",
        "--resumed",
        "--evaluate",
        "--groups",
        "--min-microbatch",
        "--max-microbatch",
        "--max-trials",
        "--time-budget",
        "--trial-timeout",
        "--one-at-a-time",
        "--seed",
        "--data-dependent",
        "--out",
        "--force",
        "--json",
        "--quiet/-q",
    },
    "verify": {
        "target",
        "arguments",
        "--script",
        "--set",
        "--full-size",
        "--logical-batch/-B",
        "--microbatch/-m",
        "--replicas/-D",
        "--device",
        "--accept",
        "--seed",
        "--watch",
        "--out",
        "--force",
        "--json",
        "--quiet/-q",
        "--explain",
        "--into",
    },
    "gate": {
        "targets",
        "--baseline",
        "--update",
        "--max-increase",
        "--min-delta",
        "--limit",
        "--fits-on",
        "--set",
        "--device",
        "--precision",
        "--microbatch/-m",
        "--accumulation-steps/-A",
        "--replicas/-D",
        "--clip",
        "--json",
        "--markdown",
        "--junit",
        "--quiet/-q",
    },
    "plan": {
        "target",
        "--on",
        "--set",
        "--precision",
        "--replicas/-D",
        "--logical-batch/-B",
        "--need",
        "--try",
        "--policy",
        "--memory-limit",
        "--headroom",
        "--clip",
        "--group-microbatches",
        "--min-microbatch",
        "--max-microbatch",
        "--max-trials",
        "--time-budget",
        "--trial-timeout",
        "--seed",
        "--data-dependent",
        "--jobs/-j",
        "--out",
        "--force",
        "--json",
        "--quiet/-q",
    },
    "report": {"result", "--out", "--force"},
    "gpus": {"card", "--from-this-machine", "--out", "--force", "--json"},
    "doctor": set(),
    "run": {"program", "--device", "--memory-limit", "--devices", "--json", "--out", "--force"},
}


def commands() -> dict[str, Any]:
    group: Any = typer.main.get_command(app)
    return dict(group.commands)


def test_commands_and_options_are_these_and_no_others() -> None:
    found = {
        name: {"/".join(parameter.opts) for parameter in command.params}
        for name, command in commands().items()
    }
    assert found == OPTIONS


@pytest.mark.parametrize("name", sorted(OPTIONS))
def test_a_command_and_each_of_its_options_has_help(name: str) -> None:
    command = commands()[name]

    assert command.help
    for parameter in command.params:
        assert getattr(parameter, "help", None), parameter.name


@pytest.mark.parametrize("words", [["--help"], ["-h"], *([name, "-h"] for name in OPTIONS)])
def test_help_is_printed_on_stdout(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, value in PLAIN.items():
        monkeypatch.setenv(name, value)

    assert main(words) == 0
    out, err = capfd.readouterr()
    assert out.strip().startswith("Usage: memfit")
    assert err == ""


def test_the_help_names_the_exit_codes(capfd: pytest.CaptureFixture[str]) -> None:
    main(["--help"])
    said = " ".join(capfd.readouterr().out.split())
    for code in ("0 ok", "2 usage", "3 nothing fits", "4 the workload's own error", "130 inter"):
        assert code in said


@pytest.mark.parametrize(
    "words",
    [["--help"], ["probe", "--help"], ["plan", "--help"], ["--version"], ["gpus", "--json"]],
)
def test_quick_words_import_nothing_heavy(words: list[str], tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from memfit.cli import main\n"
        f"main({words!r})\n"
        "heavy = {'torch', 'pandas', 'numpy', 'matplotlib', 'jinja2'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_version_is_that_of_the_package(tmp_path: Path) -> None:
    ended = memfit("--version", cwd=tmp_path)
    assert (ended.code, ended.out, ended.err) == (0, f"memfit {__version__}\n", "")


def test_the_catalogue_is_a_table(tmp_path: Path) -> None:
    ended = memfit("gpus", cwd=tmp_path)

    assert (ended.code, ended.err) == (0, "")
    for card in cards():
        assert card.slug in ended.out


def test_the_catalogue_has_one_line_a_card_in_eighty_columns(tmp_path: Path) -> None:
    narrow = {"COLUMNS": "80", "TERMINAL_WIDTH": "80"}
    lines = memfit("gpus", cwd=tmp_path, **narrow).out.splitlines()

    assert max(map(len, lines)) <= 80
    # One card's name is too long.
    assert len([line for line in lines if line.startswith(" ")]) == 1


def test_the_catalogue_as_json_has_every_card(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["gpus", "--json"]) == 0
    document = json.loads(capfd.readouterr().out)

    assert document["schema"] == "memfit.cards"
    assert [card["slug"] for card in document["cards"]] == [card.slug for card in cards()]


def test_a_reader_that_leaves_early_is_no_error(tmp_path: Path) -> None:
    done = subprocess.run(
        ["sh", "-c", f"{sys.executable} -m memfit gpus --json | head -n 1"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("{\n", "")


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
def test_the_doctor_tries_a_trial_on_every_device(tmp_path: Path) -> None:
    ended = memfit("doctor", cwd=tmp_path)

    assert (ended.code, ended.err) == (0, "")
    lines = {line[:14].strip(): line[14:] for line in ended.out.splitlines()}
    assert lines["trial on cpu"].startswith("works: a small trial on CPU")
    if unavailable_reason() is None:
        assert lines["virtual GPU"].startswith("works: a small trial on a virtual NVIDIA")
    assert lines["torch"].endswith("build")
