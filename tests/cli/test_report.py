"""`memfit report`: the same page again, and nothing that is not an answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from memfit.cli import main
from memfit.records import to_json
from tests import sample
from tests.cli.terminal import PLAIN, Ended

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.cli.conftest import Bench

    Command = Callable[..., Ended]


@pytest.fixture
def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Command:
    """Run `memfit report` in a folder that holds a `memfit.json`."""
    for name, value in PLAIN.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    Path("memfit.json").write_bytes(to_json(sample.gpt2()))

    def run(*words: str) -> Ended:
        code = main(["report", *words])
        return Ended(code, *capfd.readouterr())

    return run


def test_the_page_of_a_probe_is_made_again_as_it_was(
    answered: tuple[Bench, Ended], run: Command
) -> None:
    folder = answered[0].folder / "out"

    ended = run(str(folder / "memfit.json"), "--out", "page.html")

    assert (ended.code, ended.out, ended.err) == (0, "", "wrote page.html\n")
    assert Path("page.html").read_bytes() == (folder / "report.html").read_bytes()


def test_the_folder_of_a_result_stands_for_it(run: Command) -> None:
    assert run(".").err == "wrote report.html\n"


def test_the_page_lies_beside_the_result(run: Command) -> None:
    assert run("memfit.json").err == "wrote report.html\n"
    assert run("memfit.json").code == 0  # the same page may be written again


def test_a_page_that_differs_is_replaced_only_by_force(run: Command) -> None:
    Path("report.html").write_text("edited")
    ended = run("memfit.json")

    assert ended.code == 2
    assert ended.error == "report.html exists and differs"
    assert "--force" in ended.hint
    assert Path("report.html").read_text() == "edited"
    assert run("memfit.json", "--force").code == 0
    assert Path("report.html").read_text() != "edited"


@pytest.mark.parametrize(
    ("out", "error"),
    [
        ("folder", "folder is a folder"),
        ("missing/page.html", "there is no folder missing"),
        ("memfit.json/page.html", "there is no folder memfit.json"),
    ],
)
def test_a_page_needs_a_folder_that_exists(run: Command, out: str, error: str) -> None:
    Path("folder").mkdir()
    ended = run("memfit.json", "--out", out)

    assert (ended.code, ended.error) == (2, error)
    assert ended.hint


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda stored: {**stored, "schema": "other"}, "holds 'other', not 'memfit.probe'"),
        (lambda stored: {**stored, "schema_version": 99}, "has schema version 99"),
        (lambda stored: {**stored, "trials": 3}, "is damaged"),
        (lambda _: [1], "is not a memfit document"),
    ],
)
def test_a_document_that_is_no_answer_is_refused(run: Command, change: object, said: str) -> None:
    assert callable(change)
    stored = json.loads(Path("memfit.json").read_text())
    Path("memfit.json").write_text(json.dumps(change(stored)))

    ended = run("memfit.json")

    assert ended.code == 2
    assert ended.error.startswith("memfit.json ")
    assert said in ended.error
    assert not Path("report.html").exists()


@pytest.mark.parametrize(
    ("name", "reason"), [("missing.json", "No such file or directory"), ("empty", "Is a directory")]
)
def test_a_result_that_cannot_be_read_is_refused(run: Command, name: str, reason: str) -> None:
    Path("empty").mkdir()
    ended = run(name)

    assert (ended.code, ended.error) == (2, f"cannot read {name}: {reason}")
    assert ended.hint == "name a memfit.json or a capacity.json"


def test_half_a_document_is_refused(run: Command) -> None:
    data = Path("memfit.json").read_bytes()
    Path("memfit.json").write_bytes(data[: len(data) // 2])
    assert run("memfit.json").code == 2
