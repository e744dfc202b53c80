"""Messages over a socket, and what a worker leaves in its folder."""

from __future__ import annotations

import os
import socket
import threading
import time
from typing import TYPE_CHECKING

import pytest

from memfit.records import Split, TrialSpec
from memfit.trial.protocol import (
    MARKS,
    OUTPUT,
    REPORT,
    Channel,
    DescribeGpu,
    Ended,
    Failed,
    Gpu,
    Load,
    Mark,
    Message,
    RunTrial,
    Started,
    WorkerReport,
    read_mark,
    read_output,
    read_report,
    write_mark,
    write_report,
)
from tests import sample

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SPEC = TrialSpec(
    index=1,
    purpose="confirm",
    split=Split(microbatch=4, accumulation_steps=2),
    group_microbatches=2,
    device=sample.RTX_4090,
    timeout_s=1.5,
)


@pytest.fixture
def ends() -> Iterator[tuple[Channel, socket.socket]]:
    one, other = socket.socketpair()
    channel = Channel(one)
    yield channel, other
    channel.close()
    other.close()


@pytest.mark.parametrize(
    "message",
    [
        Load(target="work.py", parameters={"a": "1", "b": None, "c": True}, may_fork=False),
        RunTrial(spec=SPEC, folder="/tmp/with\nnewline"),
        DescribeGpu(),
        Failed(blame="workload", message="two\nlines", details="Traceback\n  …"),
        Gpu(name="NVIDIA H100", total_bytes=2**40, compute_capability="9.0"),
        Started(pid=123),
        Ended(exit_code=-9),
    ],
)
def test_a_message_arrives_as_it_was_sent(message: Message) -> None:
    one, other = map(Channel, socket.socketpair())
    one.send(message)

    assert other.receive(1) == message
    one.close()
    other.close()


def test_messages_sent_together_arrive_one_by_one(ends: tuple[Channel, socket.socket]) -> None:
    channel, other = ends
    other.sendall(b'{"type":"Started","pid":1}\n{"type":"Ended","exit_code":0}\n')

    assert channel.receive(1) == Started(pid=1)
    assert channel.receive(1) == Ended(exit_code=0)


def test_a_message_sent_in_pieces_arrives_whole(ends: tuple[Channel, socket.socket]) -> None:
    channel, other = ends
    other.sendall(b'{"type":"Star')
    assert channel.receive(0) is None

    other.sendall(b'ted","pid":7}\n')
    assert channel.receive(1) == Started(pid=7)


def test_a_message_larger_than_the_sockets_buffer_arrives() -> None:
    one, other = map(Channel, socket.socketpair())
    message = Failed(blame="workload", message="x" * 2_000_000)
    sender = threading.Thread(target=one.send, args=(message,))
    sender.start()

    assert other.receive(10) == message
    sender.join()
    one.close()
    other.close()


def test_silence_ends_at_the_timeout(ends: tuple[Channel, socket.socket]) -> None:
    started = time.monotonic()

    assert ends[0].receive(0.05) is None
    assert 0.04 < time.monotonic() - started < 2


def test_an_end_that_is_gone_is_told_from_silence(ends: tuple[Channel, socket.socket]) -> None:
    channel, other = ends
    other.close()
    with pytest.raises(EOFError):
        channel.receive(1)


def test_sending_to_an_end_that_is_gone_is_an_os_error(
    ends: tuple[Channel, socket.socket],
) -> None:
    channel, other = ends
    other.close()
    with pytest.raises(OSError, match="Broken pipe"):
        channel.send(DescribeGpu())


def write_marks(folder: Path, *marks: Mark) -> None:
    descriptor = os.open(folder / MARKS, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for mark in marks:
        write_mark(descriptor, mark)
    os.close(descriptor)


def test_the_last_mark_is_where_a_worker_was(tmp_path: Path) -> None:
    last = Mark(phase="backward", group=2, microbatch=3)
    write_marks(tmp_path, Mark(phase="imported", group=0, microbatch=0), last)

    assert read_mark(tmp_path) == last


def test_a_worker_that_left_no_mark_was_nowhere(tmp_path: Path) -> None:
    assert read_mark(tmp_path) is None
    (tmp_path / MARKS).touch()
    assert read_mark(tmp_path) is None


def test_the_last_lines_that_a_worker_printed_are_kept(tmp_path: Path) -> None:
    (tmp_path / OUTPUT).write_text("".join(f"line {n}\n" for n in range(5000)))

    assert read_output(tmp_path, lines=2) == ("line 4998", "line 4999")


def test_output_that_is_no_text_is_kept_as_far_as_it_can_be_read(tmp_path: Path) -> None:
    (tmp_path / OUTPUT).write_bytes(b"\xffbytes\n")
    assert read_output(tmp_path) == ("\N{REPLACEMENT CHARACTER}bytes",)


def test_a_worker_that_printed_nothing_has_no_lines(tmp_path: Path) -> None:
    assert read_output(tmp_path) == ()
    (tmp_path / OUTPUT).touch()
    assert read_output(tmp_path) == ()


def test_a_report_is_read_as_it_was_written(tmp_path: Path) -> None:
    answer = sample.gpt2().answer
    report = WorkerReport(
        devices=list(answer.devices),
        composition=answer.composition,
        timeline=answer.timeline,
        groups_run=2,
        optimizer_steps_attempted=2,
        optimizer_steps_applied=2,
        failure=None,
    )
    write_report(tmp_path, report)

    assert read_report(tmp_path) == report
    assert [path.name for path in tmp_path.iterdir()] == [REPORT]


def test_half_a_report_is_no_report(tmp_path: Path) -> None:
    (tmp_path / f"{REPORT}.partial").write_text('{"devices": [')
    assert read_report(tmp_path) is None
