"""A size that does not stay good, as the command line, the record and the page tell it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.cli.terminal import WORKLOADS, memfit

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.virtual
CARD = ("--device", "t4", "--memory", "2GiB", "-B", "8", "--out", "out")


def test_a_kept_graph_is_named_on_the_terminal_in_the_record_and_on_the_page(
    tmp_path: Path,
) -> None:
    ended = memfit("probe", WORKLOADS / "leaks.py", *CARD, "--set", "kind=graph", cwd=tmp_path)
    told = " ".join(ended.out.split())
    stored = json.loads((tmp_path / "out/memfit.json").read_text())["steadiness"]

    assert ended.code == 0
    assert "Memory grows by" in told
    assert "so this size does not stay good: the limit is reached after about" in told
    assert "workloads/leaks.py:" in told
    assert stored["verdict"] == "growing"
    assert stored["places"][0]["where"].startswith("workloads/leaks.py:")
    assert "traced: " in ended.err
    assert "It does not stay good." in (tmp_path / "out/report.html").read_text()


def test_a_clean_workload_is_told_nothing_of_growth(tmp_path: Path) -> None:
    ended = memfit("probe", WORKLOADS / "leaks.py", *CARD, "-q", "--json", cwd=tmp_path)

    assert ended.told["steadiness"]["verdict"] == "steady"
    assert "does not stay good" not in (tmp_path / "out/report.html").read_text()
