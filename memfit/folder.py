"""Folders of results: what may be written there, and how nothing is lost in them.

Files are written to a temporary name and renamed, so that a full disk or a kill leaves the former
file whole. An unfinished probe leaves `memfit.progress.json`; the same question asked again starts
from it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import ClassVar

from memfit.errors import CannotJudge, UsageError
from memfit.nothing import NothingFound
from memfit.records import (
    NOTHING_FITS,
    Precision,
    ProbeProgress,
    ProbeResult,
    from_json,
    schema_of,
    to_json,
)

RESULT = "memfit.json"
PROGRESS = "memfit.progress.json"
TRIALS = "trials.csv"
_LONGEST_NAME = 120
REPORT = "report.html"


class OutputFolder:
    """A folder that one run of memfit writes into."""

    kind: ClassVar[str]
    """What runs: `probe`."""
    result: ClassVar[str]
    """The file that holds the answer."""
    progress: ClassVar[str]
    """The file from which an unfinished run goes on."""

    def __init__(self, path: Path, *, force: bool) -> None:
        """Claim the folder, making it where it is missing.

        Args:
            path: The folder.
            force: Whether files of an earlier run in it may be replaced.

        Raises:
            UsageError: When it exists with other content and `force` is not set, or cannot be
                written.
        """
        self.path = path
        self.force = force
        self._folder: int | None = None
        if path.exists() and not path.is_dir():
            raise UsageError(f"{path} is a file", hint="name a folder with --out")
        if not force:
            self._refuse_to_overwrite()
        self._made = not path.exists()
        try:
            path.mkdir(parents=True, exist_ok=True)
            probe = path / ".memfit-write-test"
            probe.write_bytes(b"")
            probe.unlink()
            self._lock()
        except BlockingIOError:
            raise UsageError(
                f"another {self.kind} is writing into {path}",
                hint="wait for it, or use --out for another folder",
            ) from None
        except OSError as error:
            raise UsageError(
                f"cannot write in {path}: {error.strerror}", hint="name another folder with --out"
            ) from None

    def _lock(self) -> None:
        """Keep other runs out of the folder until this process ends, however it ends."""
        self._folder = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(self._folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._folder)
            self._folder = None
            raise

    def _refuse_to_overwrite(self) -> None:
        if not self.path.is_dir():
            return
        with contextlib.suppress(PermissionError):
            present = {entry.name for entry in self.path.iterdir()}
            if self.result in present:
                self._meet_result()
            elif present and self.progress not in present:
                raise UsageError(
                    f"{self.path} exists and is not a memfit folder",
                    hint="use --out for another folder, or --force to write into this one",
                )

    def _meet_result(self) -> None:
        """Refuse a folder that holds an answer."""
        raise UsageError(
            f"{self.path} already holds a result",
            hint="use --force to replace it, or --out for another folder",
        )

    def saved_progress(self) -> bytes | None:
        """Return what an unfinished run has left and may be gone on from, or None."""
        path = self.path / self.progress
        return None if self.force or not path.exists() else path.read_bytes()

    def write(self, name: str, data: bytes) -> None:
        """Write one file whole, or leave the former one.

        Raises:
            CannotJudge: When the system refuses, a full disk for example.
        """
        write_whole(self.path / name, data)

    def forget_progress(self) -> None:
        """Drop the unfinished state of a run that has ended."""
        (self.path / self.progress).unlink(missing_ok=True)

    def close(self) -> None:
        """Let others in, and remove the folder when this one made it and left nothing."""
        if self._folder is not None:
            os.close(self._folder)
            self._folder = None
        if self._made and not any(self.path.iterdir()):
            self.path.rmdir()


class ProbeFolder(OutputFolder):
    """The output folder of one probe."""

    kind, result, progress = "probe", RESULT, PROGRESS
    answered: ProbeResult | NothingFound | None = None
    """The answer that the folder holds and that must not be replaced; to which question is told
    once the one that is asked now is known."""

    def _meet_result(self) -> None:
        path = self.path / self.result
        try:
            data = path.read_bytes()
            if schema_of(data) == NOTHING_FITS:
                self.answered = from_json(data, NothingFound, origin=str(path))
            else:
                self.answered = from_json(data, ProbeResult, origin=str(path))
        except (OSError, UsageError):  # whatever it is, it stays
            super()._meet_result()

    def unfinished(self) -> ProbeProgress | None:
        """Return the unfinished probe that the folder holds, or None."""
        data = self.saved_progress()
        origin = str(self.path / self.progress)
        return None if data is None else from_json(data, ProbeProgress, origin=origin)

    def save_progress(self, progress: ProbeProgress) -> None:
        """Save what has finished so far; raises CannotJudge when the disk refuses."""
        self.write(self.progress, to_json(progress))

    def save_result(self, result: ProbeResult | NothingFound) -> None:
        """Save the answer, which ends the unfinished state."""
        self.write(self.result, to_json(result))
        self.forget_progress()


def slug(name: str) -> str:
    """Turn a workload's name into one for a folder: small letters, digits and hyphens."""
    return "".join(c if c.isalnum() else "-" for c in name.lower()).strip("-")


def plain_name(words: Iterable[str]) -> str:
    """Join words to a name for a folder, in letters that every system takes."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", "_".join(words)).strip(".-")[:_LONGEST_NAME]


def default_folder(
    workload: str, device: str, precision: Precision, parameters: Mapping[str, object]
) -> Path:
    """Name the folder of a probe after its question, where the user did not.

    Args:
        workload: Its name.
        device: The device's slug.
        precision: Told where it is not the default.
        parameters: Those that the user set.
    """
    words = [f"{slug(workload)}-{device}"]
    words += [] if precision is Precision.FP32 else [str(precision)]
    words += [f"{name}-{value}" for name, value in parameters.items()]
    return Path("reports") / plain_name(words)


def write_whole(path: Path, data: bytes) -> None:
    """Write a file under a temporary name and rename it into place.

    Raises:
        CannotJudge: When the system refuses, a full disk for example.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        try:
            with partial.open("wb") as stream:
                stream.write(data)
                stream.flush()
                os.fsync(stream.fileno())
            partial.replace(path)
        finally:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
    except OSError as error:
        raise CannotJudge(
            f"cannot write {path} ({len(data)} bytes): {error.strerror}; "
            f"{_free_words(path.parent)}",
            hint="make room or name another folder with --out, and run the same command again",
        ) from None


def _free_words(folder: Path) -> str:
    try:
        return f"{shutil.disk_usage(folder).free} bytes are free"
    except OSError:
        return "the folder is gone"
