"""`memfit plan` as a user runs it: the table, what goes wrong in one cell, kills and bad words."""

from __future__ import annotations

import csv
import json
import os
import shlex
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from memfit.cli import main
from memfit.virtual import unavailable_reason
from tests.cli.terminal import PLAIN, WORKLOADS, Ended, Running, memfit

virtual = pytest.mark.skipif(
    unavailable_reason() is not None, reason=f"no virtual GPU: {unavailable_reason()}"
)
CPU = ("--on", "cpu", "--memory-limit", "2GiB", "-B", "8", "-j", "1")


def place(folder: Path) -> Path:
    shutil.copy(WORKLOADS / "planned.py", folder)
    return folder


_INCIDENTAL: dict[str, Any] = {"output_tail": [], "traceback": None}
"""Times and process numbers are in the one, and frames of torch's compiler in the other, which a
nursery imports when the first trial needs it."""


def answer(result: dict[str, Any]) -> Any:
    """What two probes of one question have to agree on."""
    trials = [
        {
            **trial,
            "wall_s": 0,
            "ledger": None,  # which a probe alone has from one run more, and the parts with it
            "composition": None,
            "evidence": {**trial["evidence"], **_INCIDENTAL},
            "devices": _without_times(trial["devices"]),
        }
        for trial in result["trials"]
    ]
    kept = ("workload", "spec", "source", "split", "certificate", "notes", "environment")
    return {**{name: result[name] for name in kept}, "trials": trials}


def _without_times(devices: list[dict[str, Any]]) -> list[Any]:
    return [{**d, "phases": [{**p, "seconds": 0} for p in d["phases"]]} for d in devices]


# -- a plan on virtual cards -------------------------------------------------------------------


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ended]:
    """Two cards, three widths of which one fails, with what buys room; tests leave it as it is."""
    folder = place(tmp_path_factory.mktemp("planned"))
    ended = memfit(
        *("plan", "planned.py", "--on", "h100,rtx-4060", "--set", "width=1024,4096,6000"),
        *("--precision", "fp32", "-B", "16384", "--set", "depth=8", "--out", "out", "--json"),
        *("--try", "checkpointing,precision", "-j", "2"),
        cwd=folder,
    )
    return folder, ended


@virtual
def test_a_plan_fills_a_matrix_from_the_smallest_card_on(planned: tuple[Path, Ended]) -> None:
    told = planned[1].told

    assert told["schema"] == "memfit.capacity"
    assert told["spec"]["devices"] == ["rtx-4060", "h100-80gb"]
    assert [cell["index"] for cell in told["cells"]] == list(range(1, len(told["cells"]) + 1))
    assert {cell["source"] for cell in told["cells"]} == {"virtual"}
    sizes = {
        (c["device"]["slug"], c["setting"]["parameters"]["width"]): c["split"]["microbatch"]
        for c in told["cells"][:4]
    }
    assert sizes["h100-80gb", "1024"] > sizes["rtx-4060", "1024"] > sizes["rtx-4060", "4096"]


@virtual
def test_a_module_that_fails_for_one_setting_says_so_in_its_cells_alone(
    planned: tuple[Path, Ended],
) -> None:
    told, ended = planned[1].told, planned[1]
    failed = [c for c in told["cells"] if c["status"] == "failed"]

    assert ended.code == 4
    assert {c["setting"]["parameters"]["width"] for c in failed} == {"6000"}
    assert all("ValueError: 6000 is too wide" in c["message"] for c in failed)
    assert all("planned.py" in c["details"] for c in failed)
    others = [c for c in told["cells"] if c["setting"]["parameters"]["width"] != "6000"]
    assert {c["status"] for c in others} == {"fits"}


@virtual
def test_progress_is_a_line_for_each_cell(planned: tuple[Path, Ended]) -> None:
    lines = planned[1].err.splitlines()
    cells = [line for line in lines if line.startswith("cell ")]

    assert lines[0].startswith("planning Planned: 3 settings on 2 devices, 18 cells, 2 at once")
    assert len(cells) == len(planned[1].told["cells"])
    assert cells[-1].startswith("cell 18/18: ")
    assert all(" (virtual)" in line for line in cells if "peak" in line)
    assert lines[-1] == "wrote out/capacity.html"


@virtual
def test_a_plan_leaves_a_table_a_page_and_a_probe_for_each_cell(
    planned: tuple[Path, Ended],
) -> None:
    folder, ended = planned[0] / "out", planned[1]

    assert {p.name for p in folder.iterdir()} == {
        "capacity.json",
        "capacity.csv",
        "capacity.html",
        "cells",
    }
    assert (folder / "capacity.json").read_text() == ended.out
    rows = list(csv.DictReader((folder / "capacity.csv").read_text().splitlines()))
    for row, cell in zip(rows, ended.told["cells"], strict=True):
        assert row["status"] == cell["status"]
        assert row["set_width"] == cell["setting"]["parameters"]["width"]
        if cell["folder"]:
            stored = json.loads((folder / cell["folder"] / "memfit.json").read_text())
            assert stored["certificate"] == cell["certificate"]
            assert stored["split"]["microbatch"] == int(row["microbatch"])


@virtual
def test_what_was_tried_shows_what_it_buys(planned: tuple[Path, Ended]) -> None:
    cells = planned[1].told["cells"]
    base = next(c for c in cells if c["status"] == "fits")
    brought = {one["change"]: cells[one["cell"] - 1] for one in base["tries"]}

    assert set(brought) == {"checkpointing=True", "bf16"}
    assert all(other["base"] == base["index"] for other in brought.values())
    more = brought["checkpointing=True"]
    assert more["setting"]["parameters"]["checkpointing"] == "True"
    assert more["split"]["microbatch"] > base["split"]["microbatch"]


@virtual
@pytest.mark.parametrize("position", [0, 3, 6])
def test_a_cell_is_what_a_probe_alone_answers(
    planned: tuple[Path, Ended], tmp_path: Path, position: int
) -> None:
    cell = planned[1].told["cells"][position]
    words = shlex.split(cell["command"])
    assert words[:2] == ["memfit", "probe"]
    alone = memfit(*words[1:], "--out", tmp_path / "alone", "--json", "-q", cwd=planned[0])

    stored = json.loads((planned[0] / "out" / cell["folder"] / "memfit.json").read_text())
    assert answer(alone.told) == answer(stored)


@virtual
def test_the_page_can_be_made_again(planned: tuple[Path, Ended], tmp_path: Path) -> None:
    page = tmp_path / "again.html"
    ended = memfit("report", "out/capacity.json", "--out", page, cwd=planned[0])

    assert (ended.code, ended.err) == (0, f"wrote {page}\n")
    assert page.read_bytes() == (planned[0] / "out/capacity.html").read_bytes()


@virtual
def test_the_smallest_card_is_named_and_agrees_with_probes(tmp_path: Path) -> None:
    cards = "h100-80gb,rtx-4060,t4,a100-40gb"
    question = ("planned.py", "--set", "width=4096", "--set", "depth=16", "-B", "4096")
    ended = memfit(
        *("plan", *question, "--on", cards, "--need", "1024", "-j", "1", "--out", "out", "--json"),
        cwd=place(tmp_path),
    )
    (need,) = ended.told["needed"]
    cells = ended.told["cells"]
    below = cells[need["below"] - 1]["device"]["slug"]

    assert ended.code == 0
    assert [c["device"]["slug"] for c in cells] == ["rtx-4060", "t4", "a100-40gb", "h100-80gb"]
    assert (need["device"], below) == ("t4", "rtx-4060")
    assert {c["status"] for c in cells[2:]} == {"not_probed"}
    for card, does in ((need["device"], True), (below, False)):
        alone = memfit(
            *("probe", *question, "--device", card, "--out", card, "--json", "-q"), cwd=tmp_path
        )
        assert (alone.told["split"]["microbatch"] >= 1024) is does


# -- kills and resuming ------------------------------------------------------------------------


def test_a_killed_plan_goes_on_at_the_trial_and_another_is_kept_out(tmp_path: Path) -> None:
    gate = place(tmp_path) / "gate"
    gate.write_text("9:8")
    words = ("plan", "planned.py", *CPU, "--set", "width=8,9", "--out", "out")
    running = Running(*words, cwd=tmp_path, GATE=gate)
    running.wait_for(gate.with_suffix(".reached"))
    second = memfit(*words, cwd=tmp_path, GATE=gate)
    os.kill(running.pid, signal.SIGKILL)
    assert running.end().code == -signal.SIGKILL

    assert (second.code, second.error) == (2, "another plan is writing into out")
    first = tmp_path / "out/cells/cpu_width-8_fp32/memfit.json"
    kept = tmp_path / "out/cells/cpu_width-9_fp32/memfit.progress.json"
    before, trials = first.read_bytes(), json.loads(kept.read_text())["trials"]
    assert len(trials) == 2

    other = memfit(*words, "--seed", "3", cwd=tmp_path)
    assert other.code == 2
    assert other.error == "out holds an unfinished plan of another question: seed was 0, is 3"

    gate.unlink()
    ended = memfit(*words, "--json", cwd=tmp_path)
    assert ended.code == 0
    assert "going on after 1 finished cell of an earlier run" in ended.err
    assert first.read_bytes() == before
    assert [c["split"]["microbatch"] for c in ended.told["cells"]] == [8, 8]
    stored = json.loads(kept.with_name("memfit.json").read_text())
    assert stored["trials"][:2] == trials
    assert not (tmp_path / "out/capacity.progress.json").exists()

    again = memfit(*words, cwd=tmp_path)
    assert (again.code, again.error) == (2, "out already holds a result")


def test_ctrl_c_ends_every_lane_and_keeps_finished_trials(tmp_path: Path) -> None:
    gate = place(tmp_path) / "gate"
    gate.write_text("8:8")
    words = ("plan", "planned.py", *CPU[:-1], "2", "--set", "width=8,9", "--out", "out")
    running = Running(*words, cwd=tmp_path, GATE=gate)
    running.wait_for(gate.with_suffix(".reached"))
    os.killpg(running.pid, signal.SIGINT)
    ended = running.end()

    assert (ended.code, ended.out, ended.error) == (130, "", "interrupted")
    assert ended.hint == "finished trials are kept in out: run the same command to go on"
    kept = tmp_path / "out/cells/cpu_width-8_fp32/memfit.progress.json"
    assert len(json.loads(kept.read_text())["trials"]) == 2


# -- where there is no answer ------------------------------------------------------------------


def test_nothing_fits_anywhere_is_status_3_with_a_table(tmp_path: Path) -> None:
    ended = memfit(
        *("plan", "planned.py", "--on", "cpu", "--memory-limit", "1MiB", "--set", "width=8,9"),
        *("-j", "1", "--out", "out"),
        cwd=place(tmp_path),
    )
    assert ended.code == 3
    assert ended.out.startswith("Nothing fits in any of the 2 cells of Planned.")
    assert ended.out.count("nothing fits") == 2
    assert "microbatch 1 does not fit on CPU" in ended.out
    assert (tmp_path / "out/capacity.html").exists()


def test_a_plan_that_goes_on_does_not_ask_again_where_nothing_fitted(tmp_path: Path) -> None:
    words = ("plan", "planned.py", "--on", "cpu", "--memory-limit", "1MiB", "--set", "width=8,9")
    first = memfit(*words, "-j", "1", "--out", "out", "--json", cwd=place(tmp_path))
    table = tmp_path / "out/capacity.json"
    kept = ("command", "workload", "spec", "environment")
    progress = {"schema": "memfit.capacity-progress", "schema_version": 1}
    progress.update({name: first.told[name] for name in kept})
    table.with_name("capacity.progress.json").write_text(json.dumps(progress))
    table.unlink()

    again = memfit(*words, "-j", "1", "--out", "out", "--json", cwd=tmp_path)

    assert again.code == 3
    assert "going on after 2 finished cells" in again.err
    assert "trial 1" not in again.err
    then, now = first.told["cells"], again.told["cells"]
    for cell in (*then, *now):
        cell.pop("wall_s")  # a probe's own, and the lane's
    assert now == then


def test_a_parameter_that_the_workload_does_not_have_is_refused_before_any_cell(
    tmp_path: Path,
) -> None:
    ended = memfit(
        "plan", "planned.py", *CPU, "--set", "widht=8,9", "--out", "out", cwd=place(tmp_path)
    )
    assert (ended.code, ended.error) == (2, "Planned has no parameter 'widht'")
    assert ended.hint.startswith("it has width")
    assert not (tmp_path / "out").exists()


def test_the_same_value_written_twice_is_refused(tmp_path: Path) -> None:
    ended = memfit(
        "plan", "planned.py", *CPU, "--set", "checkpointing=true,True", cwd=place(tmp_path)
    )

    assert ended.code == 2
    assert ended.error == "--set checkpointing names true and True, which are the same value"


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ((), "no device is named"),
        (("--on", ","), "--on names nothing"),
        (("--on", "cpu", "--set", "width="), "--set width names nothing"),
        (("--on", "cpu", "--precision", "fp8"), "there is no precision 'fp8'"),
        (("--on", "cpu", "-D", "1,0"), "--replicas names '0'"),
        (
            ("--on", "cpu", "-D", "1,3", "-B", "8"),
            "a logical batch of 8 cannot be shared",
        ),
        (("--on", "cpu", "-j", "0"), "--jobs is 0"),
        (("--on", "cpu", "--need", "3", "-B", "8"), "microbatch 3 cannot be used"),
        (("--on", "cpu", "--need", "4", "--try", "precision"), "--need and --try do not go"),
        (("--on", "cpu,cpu"), "--on names cpu twice"),
        (("--on", "cuda"), ""),
    ],
)
def test_a_question_that_no_cell_can_be_asked_is_refused_at_once(
    words: tuple[str, ...],
    error: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(place(tmp_path))
    for name, value in PLAIN.items():
        monkeypatch.setenv(name, value)
    code = main(["plan", "planned.py", *words])

    ended = Ended(code, *capfd.readouterr())
    assert code in (2, 5)
    assert ended.error.startswith(error)
    assert {p.name for p in tmp_path.iterdir()} == {"planned.py"}


@virtual
@pytest.mark.parametrize(
    ("devices", "error"),
    [
        ("a100,a100-40gb", "--on names the NVIDIA A100-SXM4-40GB twice: a100 and a100-40gb"),
        ("all,t4", "--on names the Tesla T4 twice: t4 and t4"),
        ("h100,h1000", "there is no virtual GPU named 'h1000'"),
    ],
)
def test_a_card_twice_or_unknown_is_refused(
    devices: str,
    error: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(place(tmp_path))
    for name, value in PLAIN.items():
        monkeypatch.setenv(name, value)
    code = main(["plan", "planned.py", "--on", devices])

    ended = Ended(code, *capfd.readouterr())
    assert (code, ended.error) == (2, error)
