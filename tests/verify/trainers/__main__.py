"""What trainers make of uneven tokens, in figures: `python -m tests.verify.trainers --out PAGE`."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
from pathlib import Path

from memfit.verify.run import VerifyRequest, run_verify
from tests.verify.trainers.cases import CASES
from tests.verify.trainers.data import LENGTHS

_HEAD = f"""# What trainers make of uneven tokens

Made by `PYTHONPATH=. python -m tests.verify.trainers` in an environment with the extra `verify`.
Each script trains a small causal language model on {len(LENGTHS)} sequences of {min(LENGTHS)} to
{max(LENGTHS)} tokens, padded to 64, in microbatches of 2 with 4 accumulation steps; `memfit verify
--script` watches its loop. *Shares* are what the mean loss of each microbatch counts in its group;
right ones are in proportion to the tokens and add up to 1. *Gradient off by* is the largest
relative error, over the groups, of the gradient that the optimizer got.

"""


def main() -> None:
    """Run every case whose packages are here, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    words = parser.parse_args()
    here = [c for c in CASES if importlib.util.find_spec(c.package)]
    rows = []
    for case in here:
        request = VerifyRequest(target=str(case.path), script=True, arguments=[case.word])
        made = run_verify(request, print)
        assert made.loop is not None
        group = max(made.loop.groups, key=lambda g: g.error or 0)
        tokens = ", ".join(str(n) for n in group.elements)
        shares = ", ".join(f"{f:.4f}" for f in group.factors if f is not None)
        found = ", ".join(f.code for f in made.findings) or "nothing"
        rows.append(
            f"| {case.title} | {tokens} | {shares} | {sum(f or 0 for f in group.factors):.4f} | "
            f"{group.error:.1e} | {found} |"
        )
    packages = sorted({"torch", *(c.package for c in here)})
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages)
    words.out.write_text(
        _HEAD
        + "| loop | tokens of the worst group | shares | their sum | gradient off by | found |\n"
        + "|---|---|---|---|---|---|\n"
        + "\n".join(rows)
        + f"\n\n{versions}.\n"
    )


if __name__ == "__main__":
    main()
