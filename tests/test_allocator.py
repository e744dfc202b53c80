"""Settings of the allocator: their variable, and how they are put together."""

from __future__ import annotations

import pytest

from memfit.allocator import EXPANDABLE, combined, includes, settings_of, variable_for


@pytest.mark.parametrize(
    ("torch", "variable"),
    [
        ("2.7.1+cu126", "PYTORCH_CUDA_ALLOC_CONF"),
        ("2.8.0", "PYTORCH_CUDA_ALLOC_CONF"),
        ("2.9.0+cu130", "PYTORCH_ALLOC_CONF"),
        ("2.14.1+cu130", "PYTORCH_ALLOC_CONF"),
        ("3.0.0a0", "PYTORCH_ALLOC_CONF"),
    ],
)
def test_the_variable_is_the_one_that_the_version_reads(torch: str, variable: str) -> None:
    assert variable_for(torch) == variable


@pytest.mark.parametrize(
    ("present", "whole"),
    [
        ("", "expandable_segments:True"),
        ("max_split_size_mb:64", "max_split_size_mb:64,expandable_segments:True"),
        (
            "expandable_segments:False, max_split_size_mb:64",
            "expandable_segments:True,max_split_size_mb:64",
        ),
        (
            "roundup_power2_divisions:[256:1,512:2]",
            "roundup_power2_divisions:[256:1,512:2],expandable_segments:True",
        ),
    ],
)
def test_a_setting_is_added_to_those_that_are_there(present: str, whole: str) -> None:
    assert combined(present, EXPANDABLE) == whole


@pytest.mark.parametrize(
    ("present", "answer"),
    [
        ("", False),
        ("expandable_segments:False", False),
        ("expandable_segments:True", True),
        ("max_split_size_mb:64, expandable_segments: true", True),
    ],
)
def test_a_setting_is_found_whatever_its_spelling(present: str, answer: bool) -> None:
    assert includes(present, EXPANDABLE) is answer


def test_the_new_variable_goes_before_the_old_one() -> None:
    both = {"PYTORCH_CUDA_ALLOC_CONF": "a:1", "PYTORCH_ALLOC_CONF": "b:2"}
    assert settings_of(both) == "b:2"
    assert settings_of({"PYTORCH_CUDA_ALLOC_CONF": "a:1"}) == "a:1"
    assert settings_of({}) == ""
