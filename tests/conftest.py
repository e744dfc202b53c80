"""What the tests share."""

import pytest

from memfit import virtual


def pytest_collection_modifyitems(items):
    """Skip tests of the virtual GPU where it cannot run, and say why."""
    reason = virtual.unavailable_reason()
    if reason is None:
        return
    for item in items:
        if item.get_closest_marker("virtual"):
            item.add_marker(pytest.mark.skip(reason=f"no virtual GPU: {reason}"))
