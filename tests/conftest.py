"""What the tests share."""

import signal

import pytest

from memfit import virtual


def pytest_configure():
    """Let tests interrupt what they start, also where these tests run as a background job.

    A shell starts such a job with SIGINT ignored, which every process under it would inherit.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items):
    """Skip tests of the virtual GPU where it cannot run, and say why."""
    reason = virtual.unavailable_reason()
    if reason is None:
        return
    for item in items:
        if item.get_closest_marker("virtual"):
            item.add_marker(pytest.mark.skip(reason=f"no virtual GPU: {reason}"))
