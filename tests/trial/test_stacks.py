"""The stack that a worker writes when it crashes or hangs, made readable."""

import os
from pathlib import Path

from memfit import workload
from memfit.trial.stacks import ask, readable

DUMP = f"""its last line
Fatal Python error: Segmentation fault

Current thread 0x00007f1 (most recent call first):
  File "{Path.cwd()}/train.py", line 7 in fail
  File "/opt/venv/lib/python3.11/site-packages/torch/nn/linear.py", line 9 in forward
  File "{workload.__file__}", line 90 in load
  File "<frozen runpy>", line 88 in _run_code

Extension modules: numpy.core._multiarray_umath, torch._C (total: 60)
"""


def test_a_dump_keeps_the_users_frames_with_short_paths():
    assert readable(DUMP.splitlines()) == [
        "its last line",
        "",
        "Current thread 0x00007f1 (most recent call first):",
        '  File "train.py", line 7 in fail',
        '  File "torch/nn/linear.py", line 9 in forward',
    ]


def test_what_is_no_dump_stays_as_it_is():
    lines = ["epoch 1", "  loss 2.0", '  File "notes" is a word']
    assert readable(lines) == lines
    assert readable([]) == []


def test_asking_a_process_that_is_gone_does_nothing(tmp_path):
    (tmp_path / "output").touch()
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)

    ask(child, tmp_path / "output")
    ask(child, tmp_path / "none")
