"""What the tests share."""

import os
import signal

import pytest

from memfit import virtual

# Read once, when torch is imported: beside each other, tests whose threads spin only wait.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def pytest_configure():
    """Let tests stop what they start, also where these tests run as a background job.

    A shell, or nohup, starts such a job with signals ignored, which all under it would inherit.
    """
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM):
        if signal.getsignal(number) is signal.SIG_IGN:
            usual = signal.default_int_handler if number is signal.SIGINT else signal.SIG_DFL
            signal.signal(number, usual)


def pytest_collection_modifyitems(items):
    """Skip tests of the virtual GPU where it cannot run, and say why."""
    reason = virtual.unavailable_reason()
    if reason is None:
        return
    for item in items:
        if item.get_closest_marker("virtual"):
            item.add_marker(pytest.mark.skip(reason=f"no virtual GPU: {reason}"))
