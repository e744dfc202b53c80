"""What trains on the virtual GPU: one real run for each kind of training code.

`python -m tests.compatibility --markdown reports/compatibility.md --json FILE` makes the table for
the torch of this environment; `--merge A.json B.json --markdown FILE` joins those of several.
"""
