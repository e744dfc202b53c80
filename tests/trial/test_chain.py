"""What stands behind an exception: real exceptions, raised as torch and users raise them."""

import concurrent.futures
import multiprocessing
import pickle

import numpy as np
import pytest
import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader, Dataset

from memfit.records import DeviceKind, DeviceSpec, Split, TrialSpec, Verdict
from memfit.trial.chain import MOST_LINKS, links
from memfit.trial.classify import Ending, classify
from memfit.trial.protocol import WorkerFailure, WorkerReport
from memfit.units import GIB

SAYS = "CUDA out of memory. Tried to allocate 2.00 GiB"


def caught(function, *arguments):
    try:
        function(*arguments)
    except BaseException as error:  # noqa: BLE001
        return error
    raise AssertionError("nothing was raised")


def verdict_of(error):
    """Judge an exception as the only thing that a trial left."""
    failure = WorkerFailure(rule=None, chain=links(error), traceback=None)
    device = DeviceSpec(
        kind=DeviceKind.CUDA, slug="cuda", name="GPU", total_bytes=GIB, limit_bytes=GIB
    )
    spec = TrialSpec(
        index=1,
        purpose="search",
        split=Split(microbatch=1, accumulation_steps=2),
        group_microbatches=2,
        device=device,
    )
    report = WorkerReport(
        devices=[],
        composition=None,
        timeline=None,
        groups_run=0,
        optimizer_steps_attempted=0,
        optimizer_steps_applied=0,
        failure=failure,
    )
    return classify(spec, ending=Ending(exit_code=0), report=report, mark=None).verdict


# -- raised by whom ----------------------------------------------------------------------------


def allocate_too_much():
    return torch.empty(1 << 60, dtype=torch.uint8)


def raise_(error):
    raise error


def raise_from(error, cause):
    raise error from cause


def test_an_error_of_compiled_code_has_no_raiser():
    (link,) = links(caught(allocate_too_much))

    assert link.kind == "builtins.RuntimeError"
    assert "DefaultCPUAllocator: can't allocate memory" in link.message
    assert link.raised_by is None


def test_an_error_in_backward_is_compiled_codes_too():
    x = torch.ones(2, requires_grad=True)
    y = (x * x).sum()
    y.backward()
    (link,) = links(caught(y.backward))

    assert link.raised_by is None
    assert "second time" in link.message


def test_an_error_of_a_raise_statement_names_its_package():
    assert links(caught(raise_, RuntimeError(SAYS)))[0].raised_by == __name__.partition(".")[0]
    assert links(caught(torch._check, False, lambda: SAYS))[0].raised_by == "torch"


def test_an_error_that_was_never_raised_is_nobodys():
    assert links(RuntimeError(SAYS))[0].raised_by == "nobody"


def test_raising_again_does_not_change_who_raised_first():
    def again():
        try:
            allocate_too_much()
        except RuntimeError as error:
            print("a note")
            raise error  # noqa: TRY201

    assert links(caught(again))[0].raised_by is None


# -- chains ------------------------------------------------------------------------------------


def in_context(error, other):
    try:
        raise_(error)
    except BaseException:  # noqa: BLE001
        raise other  # noqa: B904


def suppressed(error, other):
    try:
        raise_(error)
    except BaseException:  # noqa: BLE001
        raise other from None


class Loud(Exception):
    def __str__(self):
        raise ValueError("cannot be told")


OOM = torch.OutOfMemoryError("CUDA out of memory.")


@pytest.mark.parametrize(
    "error",
    [
        lambda: caught(raise_from, ValueError("step failed"), OOM),
        lambda: caught(in_context, OOM, KeyError("step")),
        lambda: caught(suppressed, OOM, ValueError("step failed")),
        lambda: caught(raise_, ExceptionGroup("several", [ValueError("no"), OOM])),
        lambda: ExceptionGroup("outer", [ExceptionGroup("inner", [OOM]), ValueError("no")]),
        lambda: caught(raise_from, ValueError("outer"), ExceptionGroup("group", [OOM])),
        lambda: caught(raise_from, Loud(), OOM),
    ],
)
def test_an_out_of_memory_error_is_found_wherever_it_stands(error):
    assert verdict_of(error()) is Verdict.OOM


def test_a_chain_that_turns_back_on_itself_ends():
    one, other = ValueError("one"), ValueError("other")
    one.__cause__, other.__cause__ = other, one

    assert [link.message for link in links(one)] == ["one", "other"]


def test_a_long_chain_is_cut():
    error = ValueError(0)
    for number in range(200):
        error.__cause__, error = None, caught(raise_from, ValueError(number), error)

    assert len(links(error)) <= MOST_LINKS


def test_an_exception_that_cannot_be_told_is_told_by_its_class():
    (link,) = links(Loud())
    assert (link.kind.rpartition(".")[2], link.message) == ("Loud", "")


@pytest.mark.parametrize(
    ("error", "verdict"),
    [
        (lambda: np.empty(1 << 60, dtype=np.uint8), Verdict.HOST_OOM),
        (allocate_too_much, Verdict.HOST_OOM),
        (lambda: bytearray(1 << 62), Verdict.HOST_OOM),
        (lambda: raise_(RuntimeError(SAYS)), Verdict.ERROR),
        (lambda: raise_(ValueError(SAYS)), Verdict.ERROR),
        (lambda: raise_(type("Mine", (RuntimeError,), {})(SAYS)), Verdict.ERROR),
        (lambda: raise_(ExceptionGroup("g", [RuntimeError(SAYS)])), Verdict.ERROR),
        (lambda: in_context(KeyError("a"), RuntimeError(SAYS)), Verdict.ERROR),
        (lambda: torch._check(False, lambda: SAYS), Verdict.OOM),
        (lambda: raise_(type("Mine", (torch.OutOfMemoryError,), {})("no")), Verdict.OOM),
    ],
)
def test_only_what_torch_and_compiled_code_say_counts(error, verdict):
    assert verdict_of(caught(error)) is verdict


# -- carried over from other processes and compilers ---------------------------------------------


def fails_with(kind):
    match kind:
        case "allocator":
            return allocate_too_much()
        case "numpy":
            return np.empty(1 << 60, dtype=np.uint8)
        case "says":
            raise RuntimeError(SAYS)
        case "oom":
            raise torch.OutOfMemoryError("CUDA out of memory.")
        case "odd":
            raise Odd(SAYS, 3)
    raise ValueError(SAYS)


class Odd(RuntimeError):
    """Cannot be made from a text alone, so torch hands it on as a RuntimeError."""

    def __init__(self, text, number):
        super().__init__(text, number)


class Failing(Dataset[int]):
    def __init__(self, kind):
        self.kind = kind

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return fails_with(self.kind)


def wrapped(kind):
    """Return what a DataLoader raises of an exception in its worker, without the worker."""
    try:
        fails_with(kind)
    except BaseException:  # noqa: BLE001
        carried = ExceptionWrapper(where="in DataLoader worker process 0")
    pickle.loads(pickle.dumps(carried)).reraise()


KINDS = [
    ("allocator", Verdict.HOST_OOM),
    ("numpy", Verdict.HOST_OOM),
    ("oom", Verdict.OOM),
    ("says", Verdict.ERROR),
    ("odd", Verdict.ERROR),
    ("value", Verdict.ERROR),
]


@pytest.mark.parametrize(("kind", "verdict"), KINDS)
def test_what_a_dataloader_hands_on_is_judged_by_what_its_worker_raised(kind, verdict):
    assert verdict_of(caught(wrapped, kind)) is verdict


def test_a_real_dataloader_hands_on_what_its_worker_raised():
    loader = DataLoader(Failing("allocator"), num_workers=1)
    error = caught(lambda: next(iter(loader)))

    assert "in DataLoader worker process 0" in str(error)
    assert verdict_of(error) is Verdict.HOST_OOM


@pytest.mark.parametrize(("kind", "verdict"), [k for k in KINDS if k[0] != "odd"])
def test_what_a_process_pool_hands_on_is_judged_by_what_its_process_raised(kind, verdict):
    with concurrent.futures.ProcessPoolExecutor(
        1, mp_context=multiprocessing.get_context("fork")
    ) as pool:
        error = pool.submit(fails_with, kind).exception()

    assert verdict_of(caught(raise_, error)) is verdict


def compiled(kind):
    def backend(graph, inputs):
        return fails_with(kind)

    torch.compiler.reset()
    return torch.compile(lambda x: x + 1, backend=backend)(torch.ones(1))


@pytest.mark.parametrize(
    ("kind", "verdict"),
    [
        ("oom", Verdict.OOM),
        ("allocator", Verdict.HOST_OOM),
        ("says", Verdict.ERROR),
        ("value", Verdict.ERROR),
    ],
)
def test_what_a_compiler_passes_on_is_judged_by_what_it_caught(kind, verdict):
    error = caught(compiled, kind)

    assert type(error).__name__ == "BackendCompilerFailed"
    assert verdict_of(error) is verdict


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ("RuntimeError: CUDA error: out of memory", Verdict.OOM),
        ("OutOfMemoryError: CUDA out of memory.", Verdict.OOM),
        ("ValueError: CUDA out of memory. Tried to allocate", Verdict.ERROR),
        ("backend='inductor' raised:\nKeyError: CUDA error: out of memory", Verdict.ERROR),
    ],
)
def test_what_a_compiler_tells_of_an_exception_that_it_did_not_keep(text, verdict):
    from torch._dynamo.exc import InternalTorchDynamoError

    def hand_on():
        raise InternalTorchDynamoError(text)

    error = caught(hand_on)
    error.__traceback__ = caught(torch._check, False).__traceback__  # raised in torch

    assert verdict_of(error) is verdict
