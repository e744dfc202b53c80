"""`memfit verify` as a user runs it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.cli.terminal import memfit
from tests.verify.checking import HEAD, line_of
from tests.verify.test_loops import LOOP
from tests.verify.test_sizing import SIZED
from tests.verify.test_workloads import REFERENCE

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the reference, a broken workload, two scripts, and a cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("MEMFIT_CACHE", raising=False)
    (tmp_path / "right.py").write_text(HEAD + REFERENCE)
    (tmp_path / "wrong.py").write_text(HEAD + REFERENCE.replace("targets)", "targets) / 4"))
    (tmp_path / "train.py").write_text(HEAD + "import sys\nA = int(sys.argv[1])\n" + LOOP)
    return tmp_path


def test_a_workload_that_is_equal_ends_with_0_and_a_probe_of_it_says_so(folder: Path) -> None:
    probe = ("probe", "right.py", "--device", "cpu", "-B", "2", "--memory-limit", "2GiB")
    before = memfit(*probe, "--out", "a", cwd=folder)
    verified = memfit("verify", "right.py", "-B", "32", "-m", "8", "--into", "a", cwd=folder)
    after = memfit(*probe, "--out", "b", cwd=folder)

    assert (before.code, verified.code, after.code) == (0, 0, 0)
    assert "not verified: `memfit verify right.py`" in " ".join(before.out.split())
    assert verified.out.startswith("Accumulation reproduces the logical batch")
    assert "8+8+8+8" in verified.out
    assert "looking at one forward and backward pass" in verified.err
    assert "equal to the logical batch" in " ".join(after.out.split())
    for name in ("a", "b"):
        record = json.loads((folder / name / "memfit.json").read_bytes())
        assert record["verification"]["outcome"] == "equal"
        assert "8+8+8+8" in (folder / name / "report.html").read_text()


def test_a_workload_that_is_not_ends_with_1_and_names_code_and_place(folder: Path) -> None:
    ended = memfit("verify", "wrong.py", "--json", "--quiet", cwd=folder)
    document = json.loads(ended.out)

    assert (ended.code, ended.err) == (1, "")
    assert (document["schema"], document["outcome"]) == ("memfit.verify", "different")
    (found,) = document["findings"]
    source = REFERENCE.replace("targets)", "targets) / 4")
    assert found["code"] == "MF203"
    assert found["place"]["file"] == "wrong.py"
    assert found["place"]["line"] == line_of(source, "def loss")


def test_a_workload_is_verified_in_small_where_it_says_so(folder: Path) -> None:
    field = 'verify_with = {"width": 12}'
    (folder / "sized.py").write_text(HEAD + SIZED.replace("deep: bool = True", field))
    small, chosen, whole = (
        memfit("verify", "sized.py", *words, "--json", cwd=folder)
        for words in ((), ("--set", "width=8"), ("--full-size",))
    )

    assert [e.told["parameters"] for e in (small, chosen, whole)] == [
        {"width": 12},
        {"width": 8},
        {"width": 16},
    ]
    assert "width=12; --full-size leaves it whole" in small.err
    assert "was made smaller as its verify_with says: width=12" in small.told["notes"][0]
    assert "--full-size" not in chosen.err + whole.err
    assert (chosen.told["notes"], whole.told["notes"]) == ([], [])


def test_what_is_accepted_does_not_decide(folder: Path) -> None:
    ended = memfit("verify", "wrong.py", "--accept", "mf203", cwd=folder)
    assert ended.code == 0
    assert "MF203 error (accepted)" in ended.out


def test_a_script_is_run_with_its_words_and_its_output_kept_apart(folder: Path) -> None:
    ended = memfit("verify", "--script", "train.py", "--json", "--", "4", cwd=folder)
    document = json.loads(ended.out)

    assert ended.code == 0, ended.err
    assert document["loop"]["steps_applied"] == 3
    assert document["loop"]["backward_passes"] == 12


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("right.py", "--device", "rtx-4090"), 2, "kernels compute nothing"),
        (("right.py", "--device", "banana"), 2, "use --device cpu"),
        (("right.py", "--out", "nowhere/x.json"), 2, "there is no folder nowhere"),
        (("right.py", "-B", "1"), 2, "nothing to accumulate"),
        (("right.py", "-B", "0"), 2, "nothing to accumulate"),
        (("right.py", "-D", "9", "-B", "8"), 2, "do not go round 9 replicas"),
        (("right.py", "-B", "8", "-m", "8"), 2, "does not split"),
        (("right.py", "--accept", "MF999"), 2, "no finding 'MF999'"),
        (("right.py", "more"), 2, "one word too many"),
        ((), 2, "nothing to verify"),
        (("--script", "right.py"), 2, "no backward pass was seen"),
        (("--script", "train.py"), 4, "IndexError"),
    ],
)
def test_bad_words_say_what_to_do(
    words: tuple[str, ...], code: int, said: str, folder: Path
) -> None:
    ended = memfit("verify", *words, cwd=folder)

    assert ended.code == code
    assert said in ended.err
    assert "memfit/verify" not in ended.err


def test_a_page_is_printed_for_a_code_and_a_list_for_all(tmp_path: Path) -> None:
    page = memfit("verify", "--explain", "mf203", cwd=tmp_path)
    every = memfit("verify", "--explain", "all", cwd=tmp_path)

    assert (page.code, every.code) == (0, 0)
    assert page.out.startswith("MF203 error:")
    assert "To do: " in page.out
    assert len([line for line in every.out.splitlines() if line.startswith("MF")]) > 35
