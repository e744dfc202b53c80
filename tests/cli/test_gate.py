"""`memfit gate` as a CI job runs it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from tests.cli.terminal import WORKLOADS, Ended, memfit

BASELINE = "memfit-baseline.json"
GROUP = ("--device", "rtx-3060", "-m", "16", "-A", "2")


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ended]:
    """A checkout with a baseline that was just written, and what writing it said."""
    folder = tmp_path_factory.mktemp("repository")
    shutil.copy(WORKLOADS / "places.py", folder / "model.py")
    return folder, memfit("gate", "--update", "model.py", *GROUP, cwd=folder)


@pytest.fixture
def checkout(repository: tuple[Path, Ended], tmp_path: Path) -> Path:
    for name in ("model.py", BASELINE):
        shutil.copy(repository[0] / name, tmp_path / name)
    return tmp_path


def edit(folder: Path, before: str, after: str, name: str = "model.py") -> None:
    text = (folder / name).read_text()
    assert before in text
    (folder / name).write_text(text.replace(before, after))


@pytest.mark.virtual
def test_an_update_says_what_is_new_and_writes_the_baseline(
    repository: tuple[Path, Ended],
) -> None:
    folder, ended = repository

    assert ended.code == 0, ended.err
    assert "model.py on rtx-3060, fp32 (16 \u00d7 2): new:" in ended.out
    assert "virtual" in ended.out
    assert json.loads((folder / BASELINE).read_text())["schema"] == "memfit.baseline"


@pytest.mark.virtual
def test_an_unchanged_workload_passes_with_the_same_bytes_in_every_checkout(
    checkout: Path, repository: tuple[Path, Ended]
) -> None:
    before = (checkout / BASELINE).read_bytes()
    here, there = (memfit("gate", "--json", cwd=f) for f in (checkout, repository[0]))

    assert (here.code, there.code) == (0, 0), here.err
    assert here.out == there.out
    assert here.told["passed"]
    assert str(checkout) not in here.out
    assert (checkout / BASELINE).read_bytes() == before


@pytest.mark.virtual
def test_a_regression_fails_and_is_told_wherever_it_is_read(checkout: Path) -> None:
    edit(checkout, "hidden = F.gelu(hidden)", "hidden = F.gelu(hidden.double()).float()")
    before = (checkout / BASELINE).read_bytes()
    ended = memfit(
        "gate",
        "--markdown",
        "gate.md",
        "--junit",
        "gate.xml",
        cwd=checkout,
        GITHUB_ACTIONS="true",
        GITHUB_STEP_SUMMARY=checkout / "summary.md",
    )

    assert ended.code == 1, ended.err
    assert "+ model.py on rtx-3060, fp32 (16 \u00d7 2), virtual" in ended.out
    assert "+128.00 MiB activations, blocks.[0-1], model.py:" in ended.out
    assert "F.gelu(hidden.double()).float()" in ended.out
    markdown = (checkout / "gate.md").read_text()
    assert markdown.strip() == (checkout / "summary.md").read_text().strip()
    assert "| `+` | model.py on rtx-3060, fp32 (virtual) |" in markdown
    assert ET.parse(checkout / "gate.xml").getroot().findall(".//failure")
    (annotation,) = [line for line in ended.err.splitlines() if line.startswith("::error ")]
    assert "file=model.py,line=" in annotation
    assert (checkout / BASELINE).read_bytes() == before


@pytest.mark.virtual
def test_the_limits_may_be_wider(checkout: Path) -> None:
    edit(checkout, "hidden = F.gelu(hidden)", "hidden = F.gelu(hidden.double()).float()")
    ended = memfit("gate", "--max-increase", "500%", cwd=checkout)

    assert ended.code == 0
    assert "~ model.py" in ended.out


@pytest.mark.virtual
def test_another_parameter_cannot_be_compared_and_a_missing_entry_neither(checkout: Path) -> None:
    edit(checkout, "width: int = 128", "width: int = 256")
    shutil.copy(checkout / "model.py", checkout / "other.py")
    ended = memfit("gate", "model.py", "other.py", "--json", cwd=checkout)

    assert ended.code == 5
    model, other = ended.told["workloads"]
    assert model["differences"] == [{"field": "parameters.width", "before": "128", "now": "256"}]
    assert "the baseline has no entry for it; it has model.py" in other["reasons"][0]


@pytest.mark.virtual
def test_a_workload_that_fails_by_itself_shows_its_own_traceback(checkout: Path) -> None:
    edit(checkout, "out: Tensor = self.head(x)", "raise ValueError('no head')")
    ended = memfit("gate", cwd=checkout)

    assert ended.code == 4
    assert "! model.py" in ended.out
    assert "no head" in ended.out


@pytest.mark.virtual
def test_a_group_that_does_not_fit_any_more_fails(checkout: Path) -> None:
    edit(checkout, "16 * width", "16384 * width")
    ended = memfit("gate", cwd=checkout)

    assert ended.code == 1
    assert "it does not run any more, out of memory in" in ended.out


@pytest.mark.virtual
def test_a_limit_and_other_cards_are_held_too(checkout: Path) -> None:
    ended = memfit("gate", "--limit", "100MiB", "--fits-on", "l4", cwd=checkout)

    assert ended.code == 1
    assert "the limit is 100.00 MiB" in ended.out
    assert "fits on l4" in ended.out


@pytest.mark.virtual
def test_an_update_refuses_an_unknown_parameter_with_the_nearest_name(checkout: Path) -> None:
    before = (checkout / BASELINE).read_bytes()
    ended = memfit("gate", "--update", "model.py", "--set", "widht=8", cwd=checkout)

    assert ended.code == 2
    assert "no parameter 'widht'" in ended.error
    assert "width" in ended.hint
    assert (checkout / BASELINE).read_bytes() == before


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("gate",), 5, "there is no baseline memfit-baseline.json"),
        (("gate", "--set", "a=1"), 2, "are for --update"),
        (("gate", "--device", "l4"), 2, "are for --update"),
        (("gate", "--max-increase", "two"), 2, "is not a percentage"),
        (("gate", "--min-delta", "much"), 2, "'much' is not a size"),
        (("gate", "--fits-on", "l4", "--fits-on", "l4"), 2, "names l4 twice"),
        (("gate", "--fits-on", "l5"), 2, "l5"),
        (("gate", "--update"), 2, "there is no workload to measure"),
        (("gate", "--update", "none.py"), 2, "there is no file none.py"),
        (("gate", "--update", "none.json"), 2, "cannot read none.json"),
        (("gate", "--update", "--junit", "x"), 2, "--update makes none"),
        (("gate", "--junit", "no/x.xml"), 2, "there is no folder no"),
    ],
)
def test_bad_words_end_before_anything_runs(
    tmp_path: Path, words: tuple[str, ...], code: int, message: str
) -> None:
    ended = memfit(*words, cwd=tmp_path)

    assert (ended.code, list(tmp_path.iterdir())) == (code, [])
    assert message in ended.error


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("not JSON", "is not a memfit document"),
        ('{"schema": "memfit.baseline", "schema_version": 1, "workl', "is not a memfit document"),
        ('{"schema": "memfit.baseline", "schema_version": 99}', "schema version 99"),
        ('{"schema": "memfit.probe", "schema_version": 1}', "memfit.probe"),
        ('{"schema": "memfit.baseline", "schema_version": 1}', "is damaged"),
    ],
)
@pytest.mark.parametrize("more", [(), ("--update", "model.py")], ids=["check", "update"])
def test_a_baseline_that_is_not_sound_is_refused_and_left_alone(
    tmp_path: Path, text: str, message: str, more: tuple[str, ...]
) -> None:
    (tmp_path / BASELINE).write_text(text)
    shutil.copy(WORKLOADS / "places.py", tmp_path / "model.py")
    ended = memfit("gate", *more, cwd=tmp_path)

    assert ended.code == 2
    assert message in ended.error
    assert (tmp_path / BASELINE).read_text() == text
