"""Items on the virtual card that the parent prepared: what each took, as JSON.

`child KEY TARGET` runs one item in this process. `child --serve` imports torch once and forks a
process for each line of JSON on stdin, since importing takes longer than most items.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

from memfit.virtual import control
from tests.compatibility.catalogue import Absent, Refused, items

VALUES = "MEMFIT_COMPATIBILITY_VALUES"
_MOST_WORDS = 300


def _values() -> contextlib.AbstractContextManager[object]:
    """Values beside the item, as in the first pass of a trial, where the parent asks for them."""
    if VALUES not in os.environ:
        return contextlib.nullcontext()
    from memfit.virtual.values import ValueMode

    return ValueMode(share=1.0, note=lambda _kind: None)


def _outcome(key: str) -> dict[str, Any]:
    begin = time.monotonic()
    try:
        with _values():
            note = items()[key].run()
        outcome: dict[str, Any] = {"result": "works", "note": note or ""}
    except Absent as missing:
        outcome = {"result": "absent", "note": str(missing)}
    except Refused as refusal:
        outcome = {"result": "refused", "note": str(refusal)}
    except Exception as error:  # whatever it is, the table shows it
        words = " ".join(f"{type(error).__name__}: {error}".split())
        outcome = {"result": "fails", "note": words[:_MOST_WORDS]}
        if "MEMFIT_COMPATIBILITY_RAISE" in os.environ:
            raise
    devices = range(torch.cuda.device_count())
    return outcome | {
        "seconds": round(time.monotonic() - begin, 2),
        "allocated": [torch.cuda.max_memory_allocated(device) for device in devices],
        "reserved": [torch.cuda.max_memory_reserved(device) for device in devices],
        "invented": list(control.unknown_names()),
    }


def _run(key: str, target: str) -> None:
    """Run one item; its process then leaves as any program does, since an abort there counts."""
    assert control.active()
    outcome = _outcome(key)
    Path(f"{target}.{os.environ.get('RANK', '0')}").write_text(json.dumps(outcome), "utf-8")


def _serve() -> None:
    items()
    importlib.import_module("torch._dynamo")  # the first optimizer would import it
    out = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            os.setsid()
            log = os.open(request["log"], os.O_WRONLY | os.O_CREAT)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.environ.update(request["env"])
            _run(request["key"], request["target"])
            return
        out.write(f"{pid}\n")
        out.flush()
        _, status = os.waitpid(pid, 0)
        out.write(f"{os.waitstatus_to_exitcode(status)}\n")
        out.flush()


def main() -> None:
    """Run one item, or serve."""
    if sys.argv[1] == "--serve":
        _serve()
    else:
        _run(sys.argv[1], sys.argv[2])


if __name__ == "__main__":
    main()
