"""Answers that were found before, so that a long run can be interrupted and go on."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.accuracy.forks import Case, run


class Store:
    """A file with one finished case per line; None keeps nothing."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._known: dict[str, dict[str, Any]] = {}
        if path is not None and path.exists():
            for line in path.read_text().splitlines():
                key, answer = json.loads(line)
                if not answer.get("error", "").startswith("no answer"):
                    self._known[key] = answer

    def run(
        self, cases: Sequence[Case], *, imports: Sequence[str] = ()
    ) -> Iterator[dict[str, Any]]:
        """Run what is not known yet; yield every case's answer in order."""
        missing = [case for case in cases if _key(case) not in self._known]
        fresh = run(missing, imports=imports)
        for number, case in enumerate(cases):
            key = _key(case)
            if key not in self._known:
                self._known[key] = next(fresh)
                self._keep(key)
                print(f"{number + 1}/{len(cases)} {case.arguments}", file=sys.stderr)
            yield self._known[key]

    def _keep(self, key: str) -> None:
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a") as file:
                file.write(json.dumps([key, self._known[key]]) + "\n")


def _key(case: Case) -> str:
    return json.dumps([version("torch"), asdict(case)], sort_keys=True)
