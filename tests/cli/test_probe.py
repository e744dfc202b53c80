"""`memfit probe` from the question to the answer, and every way in which the user's code fails."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import pytest

from memfit import probe
from memfit.cli import main
from memfit.trial.runner import TrialRunner
from memfit.virtual import unavailable_reason
from tests.cli.terminal import PLAIN, WORKLOADS, Ended, memfit

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cli.conftest import Bench

CPU = ("--device", "cpu", "--memory-limit", "2GiB")


# -- the answer --------------------------------------------------------------------------------


def test_json_is_one_document_and_nothing_else(answered: tuple[Bench, Ended]) -> None:
    bench, ended = answered

    assert ended.code == 0
    assert ended.told["schema"] == "memfit.probe"
    assert ended.told["split"]["microbatch"] == 8
    assert (bench.folder / "out/memfit.json").read_text() == ended.out


def test_progress_is_told_on_stderr_a_line_for_each_trial(answered: tuple[Bench, Ended]) -> None:
    lines = answered[1].err.splitlines()

    assert lines[0].startswith("probing Gated on CPU")
    assert "limit 1.96 GiB, 40.96 MiB kept free" in lines[0]
    assert [line.split(":")[0] for line in lines[1:4]] == ["trial 1", "trial 2", "trial 3"]
    assert lines[4:] == ["wrote out/report.html"]


def test_an_answer_leaves_a_result_a_table_and_a_page(answered: tuple[Bench, Ended]) -> None:
    assert answered[0].left() == {"memfit.json", "trials.csv", "report.html"}


def test_the_command_is_kept_as_it_was_typed(answered: tuple[Bench, Ended]) -> None:
    bench, ended = answered
    assert ended.told["command"] == " ".join(["memfit", *bench.question("--json")])


def test_quiet_tells_no_progress_and_force_replaces(bench: Bench) -> None:
    (bench.folder / "out").mkdir()
    (bench.folder / "out/memfit.json").write_text("an earlier result")
    (bench.folder / "out/notes.txt").write_text("kept")

    ended = bench.ask("--quiet", "--force")

    assert (ended.code, ended.err) == (0, "")
    assert ended.out.startswith("Train with microbatch 8 and 1 accumulation step: ")
    assert bench.left() == {"memfit.json", "trials.csv", "report.html", "notes.txt"}
    assert json.loads((bench.folder / "out/memfit.json").read_text())["split"]["microbatch"] == 8


def test_the_default_folder_is_named_after_workload_and_device(tmp_path: Path) -> None:
    shutil.copy(WORKLOADS / "gated.py", tmp_path)
    (tmp_path / "gate").touch()

    ended = memfit(
        "probe", "gated:Gated", *CPU, "-B", "2", "-q", cwd=tmp_path, GATE=tmp_path / "gate"
    )

    assert ended.code == 0
    assert (tmp_path / "reports/gated-cpu/report.html").exists()


def test_the_same_command_again_tells_the_answer_and_another_parameter_has_its_own_folder(
    tmp_path: Path,
) -> None:
    shutil.copy(WORKLOADS / "gated.py", tmp_path)
    (tmp_path / "gate").touch()
    question = ("probe", "gated.py", *CPU, "-B", "2", "-q")

    def ask(*more: str) -> Ended:
        return memfit(*question, *more, cwd=tmp_path, GATE=tmp_path / "gate")

    assert ask().code == 0
    again = ask()
    assert (again.code, again.out) == (2, "")
    assert again.error.startswith("this question was answered on 20")
    assert again.error.endswith("(see reports/gated-cpu/report.html)")
    assert ask("--set", "width=8").code == 0
    assert {p.name for p in (tmp_path / "reports").iterdir()} == {"gated-cpu", "gated-cpu_width-8"}
    assert ask("-D", "2").error == (
        "reports/gated-cpu holds the answer to another question: replicas was 1, is 2"
    )


# -- the user's code ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("batch:size", "batch(1) returned tensors of shape (2, 8): none has 1"),
        ("loss:vector", "shape (1, 8), not a scalar"),
        ("loss:detached", "without a graph"),
        ("loss:nan", "the loss of the first group is nan"),
        ("model:unused", "2 of 4 parameters got no gradient from a whole group: unused.weight"),
        ("loss:raise", "ValueError: raised in loss"),
    ],
)
def test_a_workload_that_does_not_train_is_the_users_error(
    tmp_path: Path, fault: str, said: str
) -> None:
    shutil.copy(WORKLOADS / "faulty.py", tmp_path)
    (tmp_path / "fault").write_text(fault)

    ended = memfit("probe", "faulty.py", *CPU, cwd=tmp_path, FAULT=tmp_path / "fault")

    assert ended.code == 4
    assert ended.error.startswith("faulty.py failed at microbatch 1 in ")
    assert said in ended.error
    assert ended.out == ""
    assert not (tmp_path / "reports/faulty-cpu").exists()


@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        ("return torch.ones(m, 4)", "batch(1) returned None, not a microbatch"),
        ("return nn.Linear(4, 1)", "model() returned None, not a torch.nn.Module"),
    ],
)
def test_a_return_that_is_missing_is_told_by_probe_and_verify(
    tmp_path: Path, mistake: str, said: str
) -> None:
    source = (
        "import torch\nfrom torch import nn\n"
        "def model():\n    return nn.Linear(4, 1)\n"
        "def batch(m):\n    return torch.ones(m, 4)\n"
        "def loss(model, batch):\n    return model(batch).mean()\n"
    )
    (tmp_path / "work.py").write_text(source.replace(mistake, mistake.removeprefix("return ")))

    probed = memfit("probe", "work.py", *CPU, "-q", cwd=tmp_path)
    verified = memfit("verify", "work.py", "-q", cwd=tmp_path)

    assert probed.code == verified.code == 4
    assert probed.error.endswith(said)
    assert said.partition(" ")[2] in verified.error
    assert "Traceback" not in probed.err + verified.err


def test_a_model_that_needs_two_examples_is_probed_from_there_on(tmp_path: Path) -> None:
    shutil.copy(WORKLOADS / "normed.py", tmp_path)
    question = ("probe", "normed.py", *CPU, "--set", "width=8", "-B", "4", "--out", "out")

    refused = memfit(*question, cwd=tmp_path)
    ended = memfit(*question, "--min-microbatch", "2", "--json", cwd=tmp_path)

    assert refused.code == 4
    assert "Expected more than 1 value per channel" in refused.error
    assert refused.hint.endswith("; --min-microbatch 2 begins with two examples")
    assert ended.code == 0
    assert [t["spec"]["split"]["microbatch"] for t in ended.told["trials"]] == [2, 4]
    assert ended.told["spec"]["min_microbatch"] == 2
    assert ended.told["last_group"].endswith(
        "; where that leaves a microbatch below 2, leave it out"
    )


@pytest.mark.parametrize(
    ("code", "line", "error"),
    [
        (
            "def model():\n    return [1, 2\n",
            "    return [1, 2",
            "SyntaxError: '[' was never closed",
        ),
        ("def f():\n    raise ValueError('no data')\nf()\n", "line 2, in f", "ValueError: no data"),
    ],
)
def test_code_that_cannot_be_imported_is_shown(
    tmp_path: Path, code: str, line: str, error: str
) -> None:
    (tmp_path / "work.py").write_text(code)

    ended = memfit("probe", "work.py", *CPU, "--out", "out", cwd=tmp_path)

    assert ended.code == 4
    assert ended.error.startswith(f"work.py failed while it was imported: {error}")
    assert line in ended.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("target", "setting", "error", "hint"),
    [
        ("work.py", "a=1", "work.py has 2 workloads: One, Two", "pick one: work.py:One"),
        ("work.py:Two", "b=1", "Two has no parameter 'b'", "it has a"),
        ("work:One", "a=x", "--set a=x: a takes int", "as in --set a=3"),
    ],
)
def test_a_question_that_only_the_imported_code_can_refuse_is_usage(
    tmp_path: Path, target: str, setting: str, error: str, hint: str
) -> None:
    (tmp_path / "work.py").write_text(
        "import memfit\n"
        "class One(memfit.Workload):\n    a: int = 3\n"
        "class Two(One):\n    a: int = 4\n"
    )

    ended = memfit("probe", target, *CPU, "--set", setting, "--out", "out", cwd=tmp_path)

    assert (ended.code, ended.error, ended.hint) == (2, error, hint)
    assert not (tmp_path / "out").exists()


def test_a_worker_that_is_killed_ends_the_probe_and_keeps_finished_trials(bench: Bench) -> None:
    ended = bench.ask(gate="8:kill")

    assert ended.code == 4
    assert "failed at microbatch 8 in forward, group 1, microbatch 1" in ended.error
    assert "ended by SIGKILL" in ended.error
    assert bench.left() == {"memfit.progress.json"}


def test_a_worker_that_hangs_is_ended_at_its_timeout(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def patient(*words: Any, **options: Any) -> TrialRunner:
        """Give the import of torch its time on a busy machine."""
        return TrialRunner(*words, **{**options, "load_timeout_s": 300})

    monkeypatch.setattr(probe, "TrialRunner", patient)
    monkeypatch.chdir(bench.folder)
    for name, value in {**PLAIN, "GATE": str(bench.gate)}.items():
        monkeypatch.setenv(name, value)
    bench.gate.write_text("8:hang")

    code = main([*bench.question("--trial-timeout", "4")])

    ended = Ended(code, *capfd.readouterr())
    assert ended.code == 4
    assert "failed at microbatch 8 in forward" in ended.error
    assert "it had not ended after 4.00 s in forward" in ended.error
    assert ended.hint is not None
    assert ended.hint.startswith("raise --trial-timeout if the workload is only slow")
    assert "2 finished trials are kept in out" in ended.hint
    assert bench.left() == {"memfit.progress.json"}


# -- nothing fits ------------------------------------------------------------------------------


def test_nothing_fits_on_the_cpu_below_what_torch_itself_takes(bench: Bench) -> None:
    question = ("probe", "gated.py", "--device", "cpu", "--memory-limit", "1MiB", "--out", "out")
    ended = memfit(*question, cwd=bench.folder)

    assert ended.code == 3
    assert ended.error.startswith("microbatch 1 does not fit on CPU")
    assert "1003.52 KiB" in ended.error
    assert "accumulation cannot help" in ended.hint
    assert ended.out == ""
    assert "wrote out/report.html" in ended.err
    assert bench.left() == {"memfit.json", "trials.csv", "report.html"}

    page = (bench.folder / "out/report.html").read_bytes()
    told = memfit(*question, "--json", "--force", cwd=bench.folder)
    assert (told.code, told.told["schema"]) == (3, "memfit.nothing-fits")
    assert told.told["message"] == told.error
    assert b"does not fit on CPU" in page
    assert memfit("report", "out", cwd=bench.folder).code == 0


@pytest.mark.virtual
@pytest.mark.skipif(
    unavailable_reason() is not None, reason=f"no virtual GPU: {unavailable_reason()}"
)
def test_nothing_fits_on_a_card_is_explained_by_what_one_example_needs(bench: Bench) -> None:
    bench.gate.touch()
    ended = memfit(
        *("probe", "gated.py", "--device", "rtx-4090", "--memory-limit", "560MiB"),
        *("--set", "width=10000000", "-B", "2", "--out", "out"),
        cwd=bench.folder,
        GATE=bench.gate,
    )

    assert ended.code == 3
    assert ended.error.startswith("microbatch 1 does not fit on a virtual NVIDIA GeForce RTX 4090")
    assert " of 548.80 MiB; " in ended.error
    assert " dominate" in ended.error
    assert ended.hint.startswith("accumulation cannot help, a microbatch is already one example")
    assert "virtual):\nparameters " in ended.err
    table = {line[:28].strip(): line[28:].strip() for line in ended.err.splitlines()}
    assert table["parameters"] == "38.15 MiB"
    assert table["optimizer state"] == "76.29 MiB"
    assert table["CUDA context"] == "460.00 MiB"
