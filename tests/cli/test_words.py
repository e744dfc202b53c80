"""Wrong words on the command line: exit 2, one error with the number and the limit, and a hint.

Nothing in here imports torch, so the commands run in this process.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from memfit.cli import main
from memfit.virtual import unavailable_reason
from tests.cli.terminal import PLAIN, WORKLOADS, Ended

if TYPE_CHECKING:
    from collections.abc import Callable

    Command = Callable[..., Ended]

needs_virtual = pytest.mark.skipif(
    unavailable_reason() is not None, reason=f"no virtual GPU: {unavailable_reason()}"
)


@pytest.fixture
def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Command:
    """Run a command in a folder that holds `gated.py`, `notes.txt` and a folder."""
    for name, value in PLAIN.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    shutil.copy(WORKLOADS / "gated.py", tmp_path)
    Path("notes.txt").write_text("not code")
    Path("folder").mkdir()

    def run(*words: str) -> Ended:
        code = main(list(words))
        return Ended(code, *capfd.readouterr())

    return run


@pytest.mark.parametrize(
    ("target", "error", "hint"),
    [
        ("gatd.py", "there is no file gatd.py", "did you mean gated.py?"),
        ("1234567.py", "there is no file 1234567.py", "check the path"),
        ("folder/gated.py", "there is no file folder/gated.py", "check the path"),
        ("gatd.py:Gated", "there is no file gatd.py", "did you mean gated.py?"),
        ("folder", "folder is a folder, not a Python file", "name the file in it"),
        ("folder/", "folder is a folder, not a Python file", "name the file in it"),
        (".", ". is a folder, not a Python file", "name the file in it"),
        ("notes.txt", "notes.txt is not a Python file", "a workload is a .py file or a module"),
        ("", "'' names no file or module", "write file.py or file.py:Name"),
        (":Gated", "':Gated' names no file or module", "write file.py or file.py:Name"),
        (".gated", "'.gated' names no file or module", "write file.py or file.py:Name"),
    ],
)
def test_a_target_that_is_no_python_file(run: Command, target: str, error: str, hint: str) -> None:
    ended = run("probe", target)

    assert ended.code == 2
    assert ended.error == error
    assert ended.hint == hint


@pytest.mark.parametrize(
    ("words", "numbers"),
    [
        (["-B", "10", "-D", "3"], ["10", "3 replicas", "9 and 12"]),
        (["-B", "2", "-D", "4"], ["2 leaves", "4 replicas", "is 4"]),
        (["-B", "-4"], ["-4", "at least 1"]),
        (["-B", "0"], ["0", "at least 1"]),
        (["-B", "5000000000"], ["5000000000", "1000000000"]),
        (["-D", "0"], ["replicas is 0", "at least 1"]),
        (["-D", "-1"], ["replicas is -1", "at least 1"]),
        (["--min-microbatch", "0"], ["0", "at least 1"]),
        (["--min-microbatch", "4", "--max-microbatch", "3"], ["is 4, above the largest of 3"]),
        (["--max-microbatch", "0"], ["0", "at least 1"]),
        (["--max-microbatch", "-8"], ["-8", "at least 1"]),
        (["--group-microbatches", "1"], ["--group-microbatches is 1", "at least 2"]),
        (["--max-trials", "0"], ["--max-trials is 0", "at least 1"]),
        (["--clip", "-1"], ["--clip is -1.0", "above zero"]),
        (["--clip", "nan"], ["--clip is nan", "above zero"]),
        (["--trial-timeout", "0"], ["--trial-timeout is 0.0", "above zero"]),
        (["--trial-timeout", "-3"], ["--trial-timeout is -3.0", "above zero"]),
    ],
)
def test_a_number_out_of_bounds_is_told_with_its_bound(
    run: Command, words: list[str], numbers: list[str]
) -> None:
    ended = run("probe", "gated.py", "--device", "cpu", *words)

    assert ended.code == 2
    assert ended.error
    for number in numbers:
        assert number in ended.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--logical-batch", "many"], "integer"),
        (["--seed", "-1"], "greater than or equal to 0"),
        (["--seed", str(2**63)], str(2**63 - 1)),
        (["--policy", "fair"], "'exact', 'ragged'"),
        (["--precision", "fp8"], "'fp32', 'bf16', 'fp16'"),
        (["--polcy", "exact"], "--policy"),
    ],
)
def test_words_that_the_parser_refuses_exit_as_usage(
    run: Command, words: list[str], said: str
) -> None:
    ended = run("probe", "gated.py", *words)

    assert ended.code == 2
    assert said in " ".join(ended.err.replace("│", " ").split())
    assert "Traceback" not in ended.err


def test_an_unknown_command_is_told_with_the_nearest(run: Command) -> None:
    ended = run("prob")

    assert ended.code == 2
    assert "'probe'" in ended.err


def test_no_command_at_all_shows_the_help(run: Command) -> None:
    ended = run()

    assert ended.code == 2
    for name in ("probe", "report", "gpus", "doctor"):
        assert name in ended.out + ended.err


@pytest.mark.parametrize("setting", ["width", "=3", ""])
def test_a_setting_without_a_name_or_a_value_is_refused(run: Command, setting: str) -> None:
    ended = run("probe", "gated.py", "--set", setting)

    assert ended.code == 2
    assert ended.error == f"--set {setting} is not NAME=VALUE"
    assert ended.hint == "as in --set seq_len=2048"


def test_a_setting_given_twice_is_refused(run: Command) -> None:
    ended = run("probe", "gated.py", "--set", "width=3", "--set", "width=4")

    assert ended.code == 2
    assert ended.error == "--set width is given twice"
    assert ended.hint == "give each parameter once"


@pytest.mark.parametrize(
    ("words", "numbers"),
    [
        (["--memory-limit", "8000TiB"], ["--memory-limit 8000TiB is above the", "CPU"]),
        (["--memory-limit", "0"], ["0 B", "raise --memory-limit"]),
        (["--memory-limit", "-1"], ["'-1' is not a size", "20GiB"]),
        (["--memory-limit", "12 parsecs"], ["'12 parsecs' is not a size", "20GiB"]),
        (["--memory-limit", ""], ["'' is not a size", "20GiB"]),
        (["--headroom", "100%"], ["'100%' leaves nothing", "below 100%"]),
        (["--headroom", "-5%"], ["'-5%' is not a size"]),
        (["--headroom", "much"], ["'much' is not a size"]),
        (["--memory-limit", "1GiB", "--headroom", "1GiB"], ["1GiB leaves nothing of the 1.00 GiB"]),
        (["--memory-limit", "1GiB", "--headroom", "2GiB"], ["2GiB leaves nothing of the 1.00 GiB"]),
    ],
)
def test_a_limit_that_makes_no_sense_is_refused(
    run: Command, words: list[str], numbers: list[str]
) -> None:
    ended = run("probe", "gated.py", "--device", "cpu", *words)

    assert ended.code == 2
    assert ended.error
    assert ended.hint
    for number in numbers:
        assert number in ended.err


@pytest.mark.parametrize(
    ("card", "hint"),
    [
        ("rtx-4909", "did you mean rtx-4090"),
        ("h1oo-80gb", "h100-80gb"),
        ("zzzz", "`memfit gpus` lists the cards"),
    ],
)
def test_an_unknown_card_is_told_with_the_nearest(run: Command, card: str, hint: str) -> None:
    ended = run("probe", "gated.py", "--device", card)

    assert ended.code == 2
    assert ended.error == f"there is no virtual GPU named {card!r}"
    assert hint in ended.hint


@needs_virtual
@pytest.mark.virtual
@pytest.mark.parametrize(
    ("words", "numbers"),
    [
        (["--memory-limit", "40GiB"], ["40GiB is above the 23.52 GiB", "name a larger card"]),
        (["--memory-limit", "400MiB"], ["392.00 MiB", "the CUDA context of 460.00 MiB"]),
        (["--memory-limit", "20"], ["20 B", "did you mean --memory-limit 20GiB?"]),
        (["--headroom", "30GiB"], ["30GiB leaves nothing of the 23.52 GiB"]),
        (["--headroom", "23.2GiB"], ["the CUDA context of 460.00 MiB"]),
    ],
)
def test_a_limit_that_does_not_suit_the_card_is_refused(
    run: Command, words: list[str], numbers: list[str]
) -> None:
    ended = run("probe", "gated.py", "--device", "rtx-4090", *words)

    assert ended.code == 2
    assert ended.error
    assert ended.hint
    for number in numbers:
        assert number in ended.err


def test_a_gpu_that_is_not_there_leaves_the_question_open(
    run: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memfit.devices.select.Nvml.gpus", lambda _: ())

    ended = run("probe", "gated.py", "--device", "cuda")

    assert ended.code == 5
    assert ended.error == "there is no CUDA device here: NVML finds no GPU"
    assert "--device rtx-4090" in ended.hint


def test_an_output_folder_that_is_a_file_is_refused(run: Command) -> None:
    ended = run("probe", "gated.py", "--device", "cpu", "--out", "notes.txt")

    assert ended.code == 2
    assert ended.error == "notes.txt is a file"
    assert ended.hint == "name a folder with --out"


@pytest.mark.parametrize("name", ["notes.txt/result", "/proc/memfit-result"])
def test_an_output_folder_that_cannot_be_made_is_refused(run: Command, name: str) -> None:
    ended = run("probe", "gated.py", "--device", "cpu", "--out", name)

    assert ended.code == 2
    assert ended.error.startswith(f"cannot write in {name}: ")
    assert ended.hint == "name another folder with --out"


def test_an_output_folder_with_a_result_is_not_overwritten(run: Command) -> None:
    Path("folder/memfit.json").write_text("kept")

    ended = run("probe", "gated.py", "--device", "cpu", "--out", "folder")

    assert ended.code == 2
    assert ended.error == "folder already holds a result"
    assert "--force" in ended.hint
    assert Path("folder/memfit.json").read_text() == "kept"


def test_an_output_folder_with_other_things_is_left_alone(run: Command) -> None:
    Path("folder/thesis.tex").write_text("kept")

    ended = run("probe", "gated.py", "--device", "cpu", "--out", "folder")

    assert ended.code == 2
    assert ended.error == "folder exists and is not a memfit folder"
    assert "--force" in ended.hint
    assert [path.name for path in Path("folder").iterdir()] == ["thesis.tex"]
