"""Run the items one after another, or join the results of several environments."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from memfit.virtual import find_card, prepare, shared_by
from tests.compatibility.catalogue import Item, items
from tests.compatibility.table import Run, markdown, summary

ROOT = Path(__file__).parents[2]
_MOST_WORDS = 300
_PACKAGES = ("triton", "torchvision", "transformers", "lightning", "accelerate", "peft")


class _Nursery:
    """A process that has imported torch, and forks one for each item."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def _started(self, env: dict[str, str]) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.compatibility.child", "--serve"],
                cwd=ROOT,
                env=env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,  # or a line that was read ahead would be waited for
                start_new_session=True,
            )
        return self._process

    def run(self, item: Item, folder: Path, env: dict[str, str]) -> int | None:
        """Run an item; returns its exit status, or None when it took too long."""
        process = self._started(env)
        assert process.stdin is not None
        assert process.stdout is not None
        request = {
            "key": item.key,
            "target": str(folder / "result"),
            "log": str(folder / "log"),
            "env": env,
        }
        process.stdin.write(json.dumps(request).encode() + b"\n")
        pid = int(process.stdout.readline())
        ready, _, _ = select.select([process.stdout], [], [], item.timeout_s)
        _end(pid)
        status = int(process.stdout.readline())
        return status if ready else None


def _end(group: int) -> None:
    """End an item and the workers that it left behind: the group is its own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def _command(item: Item, folder: Path) -> list[str]:
    launch = [sys.executable, "-m"]
    if item.ranks > 1:
        ranks = ["--standalone", f"--nproc-per-node={item.ranks}", "-m"]
        launch += ["torch.distributed.run", *ranks]
    return [*launch, "tests.compatibility.child", item.key, str(folder / "result")]


def _environment(item: Item, folder: Path) -> dict[str, str]:
    card = find_card(item.card)
    prepared = prepare(card, total_bytes=card.total_bytes, devices=item.devices)
    # Nothing is taken from an earlier run, and nothing is fetched.
    fresh = {
        "PYTHONPATH": str(ROOT),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "PYTORCH_KERNEL_CACHE_PATH": str(folder / "kernels"),
        "HF_HOME": str(folder / "hub"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    machine = shared_by(folder) if item.ranks > 1 else {}
    return {**os.environ, **prepared, **machine, **fresh, **item.env}


def _run_afresh(item: Item, folder: Path, env: dict[str, str]) -> int | None:
    """Run an item whose settings torch reads while it is imported, or several ranks."""
    with (folder / "log").open("wb") as out:
        process = subprocess.Popen(
            _command(item, folder),
            cwd=ROOT,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        status: int | None = process.wait(item.timeout_s)
    except subprocess.TimeoutExpired:
        status = None
    _end(process.pid)
    process.wait()
    return status


def _run(item: Item, nursery: _Nursery) -> Run:
    row: dict[str, Any] = {
        "key": item.key,
        "area": item.area,
        "name": item.name,
        "what": item.what,
        "allocated": [],
        "reserved": [],
        "invented": [],
        "seconds": 0.0,
    }
    missing = [name for name in item.needs if importlib.util.find_spec(name) is None]
    if missing:
        return row | {"result": "missing", "note": ", ".join(missing)}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        env = _environment(item, folder)
        alone = item.env or item.ranks > 1
        status = (_run_afresh if alone else nursery.run)(item, folder, env)
        log = folder / "log"
        printed = log.read_text("utf-8", errors="replace") if log.exists() else ""
        ranks = [json.loads(file.read_text()) for file in sorted(folder.glob("result.*"))]
    if ranks:
        row |= ranks[0]
        row["allocated"] = [peak for rank in ranks for peak in rank["allocated"]]
        row["reserved"] = [peak for rank in ranks for peak in rank["reserved"]]
        row["invented"] = sorted({name for rank in ranks for name in rank["invented"]})
        row["seconds"] = max(rank["seconds"] for rank in ranks)
    worst = [rank for rank in ranks if rank["result"] != "works"]
    if status is None:
        return row | {"result": "hangs", "note": f"killed after {item.timeout_s:g} s"}
    if worst:
        return row | {"result": worst[0]["result"], "note": worst[0]["note"]}
    if status != 0 or len(ranks) < item.ranks:
        told = " ".join(printed.split())[-_MOST_WORDS:]
        signalled = status < 0 or "SIGABRT" in printed or "SIGSEGV" in printed
        when = "after its end" if len(ranks) == item.ranks else "in its run"
        kind = "crashes" if signalled else "fails"
        return row | {"result": kind, "note": f"exit status {status} {when}: {told}"}
    return row


def _run_again(item: Item, nursery: _Nursery, row: Run) -> Run:
    """Run what failed once more with values beside it, as a trial's first pass has them."""
    values = {"MEMFIT_COMPATIBILITY_VALUES": "1"}
    second = _run(dataclasses.replace(item, env={**item.env, **values}), nursery)
    if second["result"] != "works":
        return row
    return row | {"result": "values", "note": f"without: {row['note']}"}


def _versions() -> list[str]:
    found = []
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found.append(f"{name} {importlib.metadata.version(name)}")
    return found


def _build() -> str:
    code = "import torch; print(torch.__version__)"
    told = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return told.stdout.strip()


def _all(only: list[str], old: Run | None) -> Run:
    known = items()
    unknown = set(only) - set(known)
    if unknown:
        sys.exit(f"no such item: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    nursery = _Nursery()
    rows = {row["key"]: row for row in (old["rows"] if old else [])}
    for key, item in known.items():
        if only and key not in only:
            continue
        row = _run(item, nursery)
        if row["result"] == "fails":
            row = _run_again(item, nursery, row)
        rows[key] = row
        note = f": {row['note']}" if row["note"] else ""
        print(f"{key:24} {row['result']:8} {row['seconds']:6.1f} s{note}", file=sys.stderr)
    in_order = [rows[key] for key in known if key in rows]
    return {"torch": _build(), "packages": _versions(), "rows": in_order}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.compatibility", description=__doc__)
    parser.add_argument("--only", action="append", default=[], metavar="NAME")
    parser.add_argument("--list", action="store_true", help="show the items' names")
    parser.add_argument("--json", type=Path, metavar="FILE", help="results; with --only, updated")
    parser.add_argument("--markdown", type=Path, metavar="FILE")
    parser.add_argument("--merge", type=Path, nargs="+", metavar="FILE", help="run nothing")
    return parser.parse_args()


def main() -> None:
    """Do what the command line says; ends with 1 when an item crashed, hung or failed."""
    given = _arguments()
    if given.list:
        print("\n".join(items()))
        return
    if given.merge:
        runs = [json.loads(file.read_text("utf-8")) for file in given.merge]
    else:
        keep = given.only and given.json and given.json.exists()
        old = json.loads(given.json.read_text("utf-8")) if keep else None
        runs = [_all(given.only, old)]
        if given.json:
            given.json.write_text(json.dumps(runs[0], indent=1) + "\n", "utf-8")
    if given.markdown:
        given.markdown.write_text(markdown(runs), "utf-8")
    print("\n".join(map(summary, runs)))
    bad = {"fails", "crashes", "hangs"}
    sys.exit(any(row["result"] in bad for run in runs for row in run["rows"]))


if __name__ == "__main__":
    main()
