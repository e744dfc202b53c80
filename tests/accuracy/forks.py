"""One process on the virtual GPU per case, forked from one that has imported everything.

Run as `python -m tests.accuracy.forks MODULE...` with the environment of a virtual card: reads one
JSON case per line, and answers each with one JSON line, in order.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from memfit.virtual import Card, find_card, prepare

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One run: a function, its arguments and the card it runs on."""

    function: str
    """`module:function`; it returns something that JSON can hold."""
    arguments: dict[str, Any] = field(default_factory=dict)
    card: str = "a100-80gb"
    total_bytes: int | None = None
    """Memory of the card, where it is not the catalogue's."""
    timeout_s: int = 120


def run(cases: Sequence[Case], *, imports: Sequence[str] = ()) -> Iterator[dict[str, Any]]:
    """Run the cases in order; each answer has `value`, or `error` and what was printed.

    Args:
        cases: What to run; neighbours on one card share a parent process.
        imports: Modules to import once, before the first fork.
    """
    start = 0
    while start < len(cases):
        first = cases[start]
        end = start
        while end < len(cases) and _place(cases[end]) == _place(first):
            end += 1
        yield from _run_on_one_card(cases[start:end], imports)
        start = end


def _place(case: Case) -> tuple[str, int | None]:
    return case.card, case.total_bytes


def _run_on_one_card(cases: Sequence[Case], imports: Sequence[str]) -> Iterator[dict[str, Any]]:
    card: Card = find_card(cases[0].card)
    environment = prepare(card, total_bytes=cases[0].total_bytes or card.total_bytes)
    modules = dict.fromkeys([*imports, *(case.function.split(":")[0] for case in cases)])
    with subprocess.Popen(
        [sys.executable, "-m", "tests.accuracy.forks", *modules],
        cwd=ROOT,
        env={**os.environ, **environment, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        for case in cases:
            parent.stdin.write(json.dumps([case.function, case.arguments, case.timeout_s]) + "\n")
            parent.stdin.flush()
            line = parent.stdout.readline()
            yield json.loads(line) if line else {"error": "the parent process ended"}
        parent.stdin.close()


def main() -> None:
    """Serve cases until standard input ends."""
    # Answers have standard output to themselves; whatever else is printed goes to the errors.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import torch

    # What torch imports on first use is imported here once, not in every child.
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    for name in sys.argv[1:]:
        importlib.import_module(name)
    for line in sys.stdin:
        function, arguments, timeout_s = json.loads(line)
        print(json.dumps(_answer(function, arguments, timeout_s)), file=answers, flush=True)


def _answer(function: str, arguments: dict[str, Any], timeout_s: int) -> dict[str, Any]:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        signal.alarm(timeout_s)
        _child(function, arguments, writer)
    os.close(writer)
    with os.fdopen(reader) as answer:
        text = answer.read()
    _, status = os.waitpid(pid, 0)
    if text:
        found: dict[str, Any] = json.loads(text)
        return found
    code = os.waitstatus_to_exitcode(status)
    ending = "out of time" if code == -signal.SIGALRM else f"exit code {code}"
    return {"error": f"no answer: {ending}"}


def _child(function: str, arguments: dict[str, Any], writer: int) -> NoReturn:
    module, name = function.split(":")
    try:
        value = getattr(importlib.import_module(module), name)(**arguments)
        answer = {"value": value}
    except BaseException as error:  # noqa: BLE001  # whatever it is, it is the answer
        answer = {
            "error": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
            "traceback": traceback.format_exc()[-2000:],
        }
    with os.fdopen(writer, "w") as out:
        out.write(json.dumps(answer))
    os._exit(0)


if __name__ == "__main__":
    main()
