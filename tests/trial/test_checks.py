"""What a workload must return: what else it returns is told in its own words, not in torch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from memfit.errors import WorkloadError
from memfit.trial.checks import check_batch, check_given, check_model, check_optimizer


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (None, "model() returned None, not a torch.nn.Module"),
        ((nn.Linear(2, 1), 3), "model() returned tuple, not a torch.nn.Module"),
        (nn.Linear, "model() returned the class Linear, not a torch.nn.Module"),
        (lambda x: x, "model() returned function, not a torch.nn.Module"),
    ],
)
def test_a_model_that_is_no_module_is_refused(made: Any, said: str) -> None:
    with pytest.raises(WorkloadError) as caught:
        check_model(made)
    assert caught.value.message == said
    assert caught.value.hint == "return the module that is trained"


def test_a_wrapper_that_is_not_returned_is_refused() -> None:
    with pytest.raises(WorkloadError, match=r"^parallelize\(\) returned None"):
        check_model(None, made_by="parallelize()")


def test_an_optimizer_that_is_not_made_is_refused() -> None:
    with pytest.raises(WorkloadError, match=r"^optimizer\(\) returned the class SGD, not an"):
        check_optimizer(torch.optim.SGD)


@pytest.mark.parametrize("check", [check_batch, check_given])
def test_a_batch_that_is_not_returned_is_refused(check: Any) -> None:
    with pytest.raises(WorkloadError) as caught:
        check(None, 4)
    assert caught.value.message == "batch(4) returned None, not a microbatch"
    assert caught.value.hint is not None
    assert caught.value.hint.endswith("is a return missing?")


@pytest.mark.parametrize("batch", [torch.ones(4, 2), {"x": torch.ones(4)}, [1, 2, 3, 4], 4])
def test_a_batch_of_any_kind_is_taken(batch: Any) -> None:
    check_batch(batch, 4)
