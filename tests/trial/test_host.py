"""What the host's kernel knows of processes that it killed: its files, and real kills."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from memfit.devices.cgroup import levels, lowest_limit
from memfit.devices.kernel_log import KernelLog, killed, oom_kills_of_the_system
from memfit.trial.host import HostWatch
from memfit.units import GIB, MIB
from tests.trial.groups import MEMORY, memory_group

if TYPE_CHECKING:
    from collections.abc import Iterator

V1 = "35 31 0:32 {root} {mount} rw,relatime shared:9 - cgroup cgroup rw,memory\n"
V2 = "42 31 0:39 {root} {mount} rw,relatime - cgroup2 cgroup2 rw\n"
OTHER = "33 31 0:30 / /sys/fs/cgroup/cpuset rw,relatime - cgroup cgroup rw,cpuset\n"


class Machine:
    """A machine's process file system and control groups, as files."""

    def __init__(self, folder: Path) -> None:
        self.proc = folder / "proc"
        self.mount = folder / "cgroup"
        (self.proc / "self").mkdir(parents=True)

    def mounted(self, *lines: str, root: str = "/", groups: str) -> None:
        text = "".join(line.format(root=root, mount=self.mount) for line in (OTHER, *lines))
        (self.proc / "self/mountinfo").write_text(text)
        (self.proc / "self/cgroup").write_text(groups)

    def group(self, path: str, **files: object) -> None:
        folder = self.mount / path.lstrip("/")
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name.replace("__", ".")).write_text(f"{text}\n")

    def limits(self) -> list[tuple[str, int | None, int | None]]:
        return [(x.path, x.limit_bytes, x.oom_kills()) for x in levels(proc=self.proc)]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


EVENTS = "low 0\nhigh 0\nmax 4177\noom 3\noom_kill {}\noom_group_kill 0"


def test_version_2_is_read_from_the_process_up_to_the_mount(machine: Machine) -> None:
    machine.mounted(V2, groups="0::/user.slice/job_7\n")
    machine.group("/", memory__events=EVENTS.format(9))
    machine.group("/user.slice", memory__max=3 * GIB, memory__events=EVENTS.format(2))
    machine.group("/user.slice/job_7", memory__max="max", memory__events=EVENTS.format(1))

    assert machine.limits() == [
        ("/user.slice/job_7", None, 1),
        ("/user.slice", 3 * GIB, 2),
        ("/", None, 9),
    ]
    limited = lowest_limit(levels(proc=machine.proc))
    assert limited is not None
    assert limited.path == "/user.slice"


def test_version_1_writes_no_limit_as_a_number_and_counts_beside_its_switches(
    machine: Machine,
) -> None:
    machine.mounted(V1, groups="5:cpuset:/\n4:memory:/job\n0::/\n")
    machine.group(
        "/",
        memory__limit_in_bytes=9223372036854771712,
        memory__oom_control="oom_kill_disable 0\nunder_oom 0\noom_kill 0",
    )
    machine.group(
        "/job",
        memory__limit_in_bytes=100 * MIB,
        memory__oom_control="oom_kill_disable 0\nunder_oom 0\noom_kill 1",
    )

    assert machine.limits() == [("/job", 100 * MIB, 1), ("/", None, 0)]


def test_version_1_is_used_where_version_2_has_no_memory_controller(machine: Machine) -> None:
    machine.mounted(V1, V2, groups="4:memory:/\n0::/\n")
    machine.group("/", memory__limit_in_bytes=GIB, memory__oom_control="oom_kill 5")

    assert machine.limits() == [("/", GIB, 5)]


def test_in_a_container_the_path_is_told_from_the_host_and_the_mount_shows_its_own_group(
    machine: Machine,
) -> None:
    machine.mounted(V2, root="/docker/5d5d", groups="0::/docker/5d5d\n")
    machine.group("/", memory__max=2 * GIB, memory__events=EVENTS.format(0))

    assert machine.limits() == [("/", 2 * GIB, 0)]


@pytest.mark.parametrize("groups", ["0::/\n", "0::/../job\n", ""])
def test_files_that_are_not_there_say_nothing(machine: Machine, groups: str) -> None:
    machine.mounted(V2, groups=groups)
    assert machine.limits() == []


def test_a_kernel_that_does_not_count_says_nothing(machine: Machine) -> None:
    machine.mounted(V1, groups="4:memory:/\n")
    machine.group("/", memory__limit_in_bytes=GIB, memory__oom_control="under_oom 0")

    assert machine.limits() == [("/", GIB, None)]


def test_a_machine_without_a_process_file_system_has_no_groups(tmp_path: Path) -> None:
    assert levels(proc=tmp_path / "none") == ()
    assert oom_kills_of_the_system(tmp_path / "none") is None


@pytest.mark.parametrize(
    ("line", "pids"),
    [
        (
            "3,1402,11204077656,-;Memory cgroup out of memory: Killed process 28088 (python3) "
            "total-vm:119036kB, anon-rss:108936kB, file-rss:6616kB, shmem-rss:0kB, UID:0",
            [28088],
        ),
        ("3,9,1,-;Out of memory: Killed process 77 (python3) total-vm:9kB", [77]),
        ("Out of memory: Kill process 1234 (python3) score 900 or sacrifice child", [1234]),
        ("6,7,8,-;oom_reaper: reaped process 28088 (python3), now anon-rss:0kB", []),
        ("4,5,6,-;python3[28587]: segfault at 0 ip 00007f3d0ab85ad8 sp 00007ffe error 4", []),
        ("3,1,1,-;systemd: Killed process 12 (sleep) with signal SIGKILL", []),
        ("", []),
    ],
)
def test_the_kernels_words_name_the_process_that_it_killed(line: str, pids: list[int]) -> None:
    assert list(killed(line)) == pids


def test_a_log_that_is_not_there_is_unreadable(tmp_path: Path) -> None:
    log = KernelLog(tmp_path / "none")

    assert not log.readable
    assert log.kills() == {}
    log.close()


def test_only_what_the_log_says_after_it_was_opened_counts(tmp_path: Path) -> None:
    path = tmp_path / "kmsg"
    path.write_text("3,1,1,-;Out of memory: Killed process 1 (old)\n")
    log = KernelLog(path)
    with path.open("a") as stream:
        stream.write("3,2,2,-;Out of memory: Killed process 2 (new)\n")

    assert log.readable
    assert list(log.kills()) == [2]
    log.close()


# -- real kills --------------------------------------------------------------------------------

EATS = """
import sys
sys.stdin.read()
blocks = []
while True:
    blocks.append(bytearray(b"x" * (1 << 20)))
"""


@pytest.fixture
def small_group() -> Iterator[Path]:
    with memory_group(64 * MIB) as group:
        yield group


@contextlib.contextmanager
def started(group: Path, code: str) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as child:
        (group / "cgroup.procs").write_text(str(child.pid))
        try:
            yield child
        finally:
            child.kill()


@pytest.mark.skipif(MEMORY is None, reason="no control group can be made here")
def test_a_process_that_the_kernel_kills_is_counted_and_named(small_group: Path) -> None:
    with started(small_group, EATS) as child:
        watch = HostWatch(child.pid)
        assert child.stdin is not None
        child.stdin.close()
        assert child.wait() == -signal.SIGKILL
        record = watch.record([child.pid])
        watch.close()

    assert record.cgroup_limit_bytes == 64 * MIB
    assert record.cgroup_oom_kills == 1
    assert (record.cgroup or "").endswith(small_group.name)
    assert record.kernel_log in ("names it", "unreadable")
    if record.kernel_line is not None:
        assert f"process {child.pid}" in record.kernel_line


@pytest.mark.skipif(MEMORY is None, reason="no control group can be made here")
def test_a_process_that_somebody_else_kills_is_neither(small_group: Path) -> None:
    with started(small_group, EATS) as child:
        watch = HostWatch(child.pid)
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
        record = watch.record([child.pid])
        watch.close()

    assert record.cgroup_oom_kills == 0
    assert record.kernel_log in ("does not name it", "unreadable")
    assert record.kernel_line is None
