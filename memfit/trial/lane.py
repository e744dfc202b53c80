"""A lane: probes of one workload that run one after another and share a nursery.

Importing torch and the user's code costs seconds. A nursery that has ended its probe waits here for
the next one, which may have other parameters and another virtual card.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from memfit.errors import Interrupted
from memfit.virtual import CARD_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from memfit.trial.runner import Nursery


class Lane:
    """Keeps a nursery between probes; a process that a thread has started ends with that thread."""

    def __init__(self, stop: threading.Event | None = None) -> None:
        """Make an empty lane.

        Args:
            stop: Ends the running trial, and with it the probe, once it is set.
        """
        self._stop = stop or threading.Event()
        self._waiting: tuple[str, dict[str, str], Nursery] | None = None

    def stop(self) -> None:
        """Have the running trial end."""
        self._stop.set()

    def go_on(self) -> None:
        """Let trials run again."""
        self._stop.clear()

    def check(self) -> None:
        """Raise Interrupted when the lane is to stop."""
        if self._stop.is_set():
            raise Interrupted("interrupted")

    def take(self, target: str, environment: Mapping[str, str]) -> Nursery | None:
        """Hand out the nursery that waits, when it can serve; one that cannot is ended.

        Args:
            target: The user's file or module.
            environment: Variables of the workers; only the virtual card may be another.
        """
        waiting, self._waiting = self._waiting, None
        if waiting is None:
            return None
        its_target, its_environment, nursery = waiting
        if (its_target, its_environment) == (target, _without_card(environment)):
            return nursery
        nursery.kill()
        return None

    def keep(self, target: str, environment: Mapping[str, str], nursery: Nursery) -> None:
        """Keep a nursery that waits for orders."""
        self.close()
        self._waiting = (target, _without_card(environment), nursery)

    def close(self) -> None:
        """End the nursery that waits."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            waiting[-1].kill()


def _without_card(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name != CARD_VARIABLE}
