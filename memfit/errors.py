"""Everything that memfit raises on purpose.

    MemfitError
    ├── UsageError              2    words on the command line, a file, a limit, a split
    ├── NothingFits             3    not even the smallest microbatch fits
    ├── WorkloadError           4    the user's own code failed
    ├── CannotJudge             5    no device, no compiler, no space: the question stays open
    ├── Interrupted           130    Ctrl-C or SIGTERM
    └── InternalError          70    our bug

Each error says what happened with the numbers, and `hint` says what to do next. The command line
prints both and exits with `exit_code`; nothing else in the project knows exit codes.
"""

from __future__ import annotations

from typing import ClassVar


class MemfitError(Exception):
    """Base of all errors that memfit raises on purpose."""

    exit_code: ClassVar[int] = 70

    def __init__(
        self, message: str, *, hint: str | None = None, details: str | None = None
    ) -> None:
        """Describe one failure.

        Args:
            message: What happened, with the number and the limit.
            hint: What to do next, or None where there is nothing to advise.
            details: Longer evidence shown under the message, such as the user's own traceback.
        """
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.details = details


class UsageError(MemfitError):
    """The question itself is wrong: bad words, a missing file, a limit that makes no sense."""

    exit_code = 2


class NothingFits(MemfitError):
    """Not even the smallest microbatch fits, so no accumulation can help."""

    exit_code = 3


class WorkloadError(MemfitError):
    """The user's own code failed, crashed or hung; `details` holds its own words."""

    exit_code = 4


class CannotJudge(MemfitError):
    """The question is sound, but this machine cannot answer it."""

    exit_code = 5


class Interrupted(MemfitError):
    """The user or the system asked memfit to stop."""

    exit_code = 130


class InternalError(MemfitError):
    """A defect in memfit itself."""

    exit_code = 70
