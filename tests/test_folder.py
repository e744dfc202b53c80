"""The folder of a probe: nothing in it is overwritten, half-written or lost."""

from __future__ import annotations

import errno
import os
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from memfit.errors import CannotJudge, UsageError
from memfit.folder import PROGRESS, RESULT, ProbeFolder, write_whole
from memfit.records import ProbeProgress
from tests import sample

if TYPE_CHECKING:
    from collections.abc import Callable


def progress() -> ProbeProgress:
    result = sample.gpt2()
    return ProbeProgress(
        command=result.command,
        workload=result.workload,
        spec=result.spec,
        environment=result.environment,
        trials=result.trials,
    )


def fails_with(number: int) -> Callable[..., None]:
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_missing_folder_is_made_with_its_parents(tmp_path: Path) -> None:
    ProbeFolder(tmp_path / "a/b", force=False)
    assert names(tmp_path / "a/b") == set()


def test_an_empty_folder_is_taken(tmp_path: Path) -> None:
    assert ProbeFolder(tmp_path, force=False).unfinished() is None


def test_a_file_is_no_folder_even_by_force(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    with pytest.raises(UsageError, match=r"file is a file"):
        ProbeFolder(tmp_path / "file", force=True)


@pytest.mark.parametrize("name", [RESULT, "thesis.tex"])
def test_what_is_in_a_folder_is_replaced_only_by_force(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("kept")
    with pytest.raises(UsageError) as caught:
        ProbeFolder(tmp_path, force=False)

    assert caught.value.hint is not None
    assert "--force" in caught.value.hint
    ProbeFolder(tmp_path, force=True)
    assert (tmp_path / name).read_text() == "kept"


def test_force_starts_again_where_a_probe_is_unfinished(tmp_path: Path) -> None:
    with closing(ProbeFolder(tmp_path, force=False)) as folder:
        folder.save_progress(progress())

    with closing(ProbeFolder(tmp_path, force=False)) as folder:
        assert folder.unfinished() == progress()
    with closing(ProbeFolder(tmp_path, force=True)) as folder:
        assert folder.unfinished() is None


def test_a_folder_takes_one_probe_at_a_time(tmp_path: Path) -> None:
    with (
        closing(ProbeFolder(tmp_path, force=False)),
        pytest.raises(UsageError, match="another probe is writing"),
    ):
        ProbeFolder(tmp_path, force=True)


def test_the_answer_ends_the_unfinished_state(tmp_path: Path) -> None:
    folder = ProbeFolder(tmp_path, force=False)
    folder.save_progress(progress())
    folder.save_result(sample.gpt2())

    assert names(tmp_path) == {RESULT}


def test_a_folder_made_in_vain_is_removed_again(tmp_path: Path) -> None:
    ProbeFolder(tmp_path / "new", force=False).close()
    assert not (tmp_path / "new").exists()


def test_a_folder_that_was_there_stays(tmp_path: Path) -> None:
    ProbeFolder(tmp_path, force=False).close()
    assert tmp_path.exists()


def test_a_folder_with_trials_stays(tmp_path: Path) -> None:
    folder = ProbeFolder(tmp_path / "new", force=False)
    folder.save_progress(progress())
    folder.close()

    assert names(tmp_path / "new") == {PROGRESS}


def test_a_folder_that_refuses_writing_is_told_before_any_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "write_bytes", fails_with(errno.EROFS))
    with pytest.raises(UsageError, match=r"cannot write in .*: Read-only file system"):
        ProbeFolder(tmp_path, force=False)


def test_damaged_progress_is_refused_and_kept(tmp_path: Path) -> None:
    (tmp_path / PROGRESS).write_text("{")
    with pytest.raises(UsageError, match=PROGRESS):
        ProbeFolder(tmp_path, force=False).unfinished()
    assert (tmp_path / PROGRESS).read_text() == "{"


def test_a_file_is_written_under_its_own_name_only(tmp_path: Path) -> None:
    write_whole(tmp_path / "page.html", b"page")

    assert names(tmp_path) == {"page.html"}
    assert (tmp_path / "page.html").read_bytes() == b"page"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_disk_that_refuses_leaves_the_former_file_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    path = tmp_path / "page.html"
    write_whole(path, b"former")
    monkeypatch.setattr(os, "fsync", fails_with(number))

    with pytest.raises(CannotJudge) as caught:
        write_whole(path, b"later")

    assert caught.value.message.startswith(
        f"cannot write {path} (5 bytes): {os.strerror(number)}; "
    )
    assert "bytes are free" in caught.value.message
    assert names(tmp_path) == {"page.html"}
    assert path.read_bytes() == b"former"


def test_a_folder_that_has_gone_is_said_to_be_gone(tmp_path: Path) -> None:
    with pytest.raises(CannotJudge, match=r"No such file or directory; the folder is gone"):
        write_whole(tmp_path / "gone/page.html", b"page")
