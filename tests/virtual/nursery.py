"""A process that imports torch once and forks a child for each script that it is given.

It reads lines of JSON with `code` and `env` on stdin, and answers each with a line of `output`,
what the child printed, and `status`, how it ended.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback

import torch  # noqa: F401  (imported before the forks, which is the point)


def _child(code: str, env: dict[str, str], log: int) -> None:
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(env)
    status = 0
    try:
        exec(compile(code, "<test>", "exec"), {"__name__": "__main__"})
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def main() -> None:
    """Serve until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        request = json.loads(line)
        with tempfile.TemporaryFile() as log:
            pid = os.fork()
            if pid == 0:
                _child(request["code"], request["env"], log.fileno())
            _, status = os.waitpid(pid, 0)
            log.seek(0)
            output = log.read().decode(errors="replace")
        answers.write(json.dumps({"output": output, "status": status}) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
