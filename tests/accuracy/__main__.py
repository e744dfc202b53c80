"""`python -m tests.accuracy`: run every data set that can be run, and write the report."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from memfit.virtual import unavailable_reason
from tests.accuracy import attention, ladder, operators, report, traces
from tests.accuracy.forks import ROOT
from tests.accuracy.rows import Result, Row
from tests.accuracy.store import Store
from tests.accuracy.truth import Truth


def main() -> None:
    """Parse, run, write."""
    options = _options()
    reason = unavailable_reason()
    if reason is not None:
        sys.exit(f"no virtual GPU: {reason}")
    truth = Truth(options.truth)
    if not truth.rows:
        print(f"{options.truth / 'measured.csv'} is missing: its data sets are skipped")
    store = Store(options.store)
    torch_version = version("torch").split("+")[0]
    sets: dict[str, Callable[[], Result]] = {
        "traces": lambda: traces.compare(truth, store, torch_version),
        "attention": lambda: attention.compare(truth, store, torch_version),
        "operators": lambda: operators.compare(truth, store, torch_version),
        "timm": lambda: ladder.compare(truth, store, torch_version, counts=options.timm_rows),
    }
    chosen = options.only or list(sets)
    results = [sets[name]() for name in chosen]
    versions = [_versions()]
    for python in options.also:
        more, theirs = _elsewhere(python, options, chosen)
        versions.append(theirs)
        results += more
    _tell(results)
    if options.json:
        options.json.write_text(
            json.dumps({"versions": versions[0], "results": [asdict(one) for one in results]})
        )
    if options.markdown:
        text = report.markdown(results, versions=versions, command=_command(options))
        options.markdown.parent.mkdir(parents=True, exist_ok=True)
        options.markdown.write_text(text)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.accuracy", description=__doc__)
    parser.add_argument(
        "--truth", type=Path, required=True, help="folder with measured.csv and traces/"
    )
    parser.add_argument("--markdown", type=Path, help="the report to write")
    parser.add_argument("--json", type=Path, help="the comparisons to write")
    parser.add_argument(
        "--also",
        action="append",
        default=[],
        metavar="PYTHON",
        help="another interpreter, with another torch, to run the same in",
    )
    parser.add_argument("--store", type=Path, help="file of finished runs, to go on from")
    parser.add_argument(
        "--only", action="append", choices=["traces", "attention", "operators", "timm"]
    )
    parser.add_argument(
        "--timm-rows",
        type=int,
        nargs=2,
        default=(200, 200),
        metavar=("NHWC", "NCHW"),
        help="rows of each memory layout",
    )
    return parser.parse_args()


def _versions() -> str:
    found = []
    for package in ("torch", "nvidia-cudnn-cu13", "nvidia-cudnn-cu12", "timm"):
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    return ", ".join(found) + f", Python {sys.version.split()[0]}"


def _elsewhere(
    python: str, options: argparse.Namespace, chosen: list[str]
) -> tuple[list[Result], str]:
    """Run the same with another interpreter."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "results.json"
        command = [python, "-m", "tests.accuracy", "--truth", str(options.truth.absolute())]
        command += ["--json", str(path), "--timm-rows", *map(str, options.timm_rows)]
        for name in chosen:
            command += ["--only", name]
        if options.store:
            command += ["--store", str(options.store.absolute())]
        subprocess.run(command, cwd=ROOT, check=True)
        told = json.loads(path.read_text())
    results = [
        Result(**{**one, "rows": [Row(**row) for row in one["rows"]]}) for one in told["results"]
    ]
    return results, told["versions"]


def _tell(results: list[Result]) -> None:
    for result in results:
        exact = sum(row.exact for row in result.rows)
        torch = result.rows[0].torch if result.rows else "-"
        print(f"{result.data_set}, torch {torch}: {exact} of {len(result.rows)} rows exact")
        for note in result.notes:
            print(f"  {note}")


def _command(options: argparse.Namespace) -> str:
    words = ["python -m tests.accuracy --truth DIR"]
    words += ["--also OTHER_PYTHON" for _ in options.also]
    words.append(f"--timm-rows {' '.join(map(str, options.timm_rows))}")
    if options.markdown:
        words.append("--markdown reports/accuracy.md")
    return " ".join(words)


if __name__ == "__main__":
    main()
