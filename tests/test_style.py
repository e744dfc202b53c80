"""The checks of style and types, so that one command runs everything."""

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TORCH_OF_THE_TYPES = (2, 14)


@pytest.mark.parametrize(
    "check",
    [["ruff", "check", "."], ["ruff", "format", "--check", "."], ["mypy"]],
    ids=["lint", "format", "types"],
)
def test_the_code_passes(check):
    pytest.importorskip(check[0])
    version = importlib.metadata.version("torch").split(".")
    if check == ["mypy"] and (int(version[0]), int(version[1])) < TORCH_OF_THE_TYPES:
        pytest.skip("types are checked with the annotations of a newer torch, which differ")
    done = subprocess.run(
        [sys.executable, "-m", *check], cwd=ROOT, capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stdout + done.stderr
