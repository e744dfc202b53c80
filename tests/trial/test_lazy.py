"""Training in a nursery imports no compiler, until something is compiled, and no meta kernels."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from memfit.trial import lazy

_BEGIN = """
import json, os, sys
from memfit.trial import lazy

lazy.import_torch()
import torch
from torch.utils.checkpoint import checkpoint

lazy.install()
torch.set_num_threads(1)

def imported():
    return "torch._dynamo.convert_frame" in sys.modules

def train(*, checkpointed=False):
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        x = torch.ones(2, 4)
        out = checkpoint(model, x, use_reentrant=False) if checkpointed else model(x)
        out.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""
_EACH = """
print(flush=True)
if not (pid := os.fork()):
    def show(*values):
        print(json.dumps([{name!r}, *values]), flush=True)
{code}
    os._exit(0)
show_code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
print(json.dumps([{name!r} + " ended", show_code]), flush=True)
"""
CASES = {
    "training": """
    train(checkpointed=True)
    meta = torch.nn.Linear(4, 4, device="meta")
    show(imported(), lazy.lacks_kernels(), "torch._meta_registrations" in sys.modules)
""",
    "fake": """
    from torch._subclasses.fake_tensor import FakeTensorMode
    begin = FakeTensorMode.__init__
    with FakeTensorMode():
        shape = torch.nn.Conv2d(3, 4, 3)(torch.ones(1, 3, 8, 8)).shape
    there = sys.modules["torch._meta_registrations"] is torch._meta_registrations
    show(list(shape), lazy.lacks_kernels(), there, FakeTensorMode.__init__ is begin)
""",
    "modules": """
    import torch.utils._content_store
    import torch._refs.linalg
    from torch import _decomp
    show([
        name for name in ("_decomp", "_meta_registrations", "_prims", "_refs")
        if getattr(torch, name) is not sys.modules["torch." + name]
    ], lazy.lacks_kernels(), _decomp is torch._decomp, torch._refs.linalg.norm.__module__)
""",
    "module of a package": """
    import torch._refs.linalg
    from torch._refs import abs, linalg
    show(abs is torch._meta_registrations.torch._refs.abs, linalg is torch._refs.linalg)
""",
    "looked at": """
    import inspect
    looked = [hasattr(module, "__file__") for module in list(sys.modules.values())]
    found = inspect.getmodule(sys._getframe())
    show(imported(), lazy.lacks_kernels(), hasattr(torch._refs, "__wrapped__"))
""",
    "sharding": """
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor
    import torch.distributed.tensor.parallel, torch.distributed.checkpoint
    show(imported(), fully_shard.__module__)
""",
    "module of the compiler": """
    loaded = []
    class Watch:
        def find_spec(self, name, path, target=None):
            if name == "torch._dynamo.utils": loaded.append(name)
    sys.meta_path.insert(1, Watch())
    import torch._dynamo.utils
    show(len(loaded), torch._dynamo.symbolic_convert.torch._dynamo.utils is torch._dynamo.utils,
         torch._dynamo.convert_frame.CleanupManager is torch._dynamo.utils.CleanupManager)
""",
    "attributes": """
    show(torch._refs.linalg.norm.__module__, torch._decomp is sys.modules["torch._decomp"])
""",
    "fake in a trial": """
    lazy.end_instead_of_importing()
    from torch._subclasses.fake_tensor import FakeTensorMode
    FakeTensorMode()
    show("imported")
""",
    "fake in a trial once there": """
    lazy.import_missing(lazy.NEEDS_KERNELS)
    lazy.import_missing(lazy.NEEDS_COMPILER)
    lazy.end_instead_of_importing()
    from torch._subclasses.fake_tensor import FakeTensorMode
    FakeTensorMode()
    show("imported")
""",
    "compiled in a trial once there": """
    lazy.import_missing(lazy.NEEDS_COMPILER)
    lazy.end_instead_of_importing()
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    show("compiled")
""",
    "missing in a trial": """
    lazy.end_instead_of_importing()
    from memfit.trial.checks import CheckFailed
    for error in (MemoryError(), torch.OutOfMemoryError(), CheckFailed("what", "why", hint="no")):
        lazy.end_where_kernels_were_missing(error)
    try:
        try:
            torch.nn.Embedding(4, 5, device="meta")(torch.zeros(2, dtype=int, device="meta"))
        except NotImplementedError as cause:
            raise RuntimeError("in somebody's words") from cause
    except RuntimeError as error:
        show("failed")
        lazy.end_where_kernels_were_missing(error)
    show("ignored")
""",
    "compiled": """
    train()
    settings = torch._dynamo.config
    compiled = torch.compile(lambda x: x + 1, backend="eager")
    compiled(torch.ones(2))
    same = settings is torch._dynamo.config is sys.modules["torch._dynamo.config"]
    train(checkpointed=True)
    show(imported(), same)
""",
    "module": """
    import torch._dynamo.utils
    from torch._dynamo import config, convert_frame
    same = sys.modules["torch._dynamo.utils"] is torch._dynamo.utils
    show(imported(), same and config is torch._dynamo.config)
""",
    "kept out": """
    kept_out = torch._dynamo.disable(lambda x: x.sin())
    before = kept_out(torch.zeros(1)).item()
    lazy.import_compiler()
    try:
        torch.compile(lambda x: kept_out(x) + 1, backend="eager", fullgraph=True)(torch.zeros(1))
    except Exception as error:
        show(before, type(error).__name__)
""",
    "trial": """
    lazy.end_instead_of_importing()
    train()
    show("trained")
    torch._dynamo.reset()
    show("imported")
""",
    "backend": """
    lazy.import_compiler()
    lazy.end_instead_of_importing()
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    show("compiled")
    torch.compile(lambda x: x + 1)(torch.ones(2))
    show("imported")
""",
    "backend there": """
    lazy.import_missing(lazy.NEEDS_COMPILER)
    lazy.import_missing(lazy.NEEDS_BACKEND)
    lazy.end_instead_of_importing()
    import torch._inductor.compile_fx
    show("imported")
""",
}


@pytest.fixture(scope="module")
def seen() -> dict[str, list[Any]]:
    """What each case showed, in a child of one process that has torch and the stand-in."""
    code = _BEGIN + "".join(_EACH.format(name=name, code=code) for name, code in CASES.items())
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line]
    found: dict[str, list[Any]] = {}
    for name, *values in lines:
        found.setdefault(name, []).append(values[0] if len(values) == 1 else values)
    return found


def test_training_imports_no_compiler(seen: dict[str, list[Any]]) -> None:
    assert seen["training"] == [[False, True, False]]


def test_fake_tensors_bring_the_kernels_for_the_meta_device(seen: dict[str, list[Any]]) -> None:
    assert seen["fake"] == [[[1, 4, 6, 6], False, True, False]]


def test_a_module_of_the_kernels_brings_all_of_them(seen: dict[str, list[Any]]) -> None:
    assert seen["modules"] == [[[], False, True, "torch._refs.linalg"]]
    assert seen["module of a package"] == [[True, True]]
    assert seen["attributes"] == [["torch._refs.linalg", True]]


def test_in_a_trial_fake_tensors_end_it_so_that_the_nursery_imports_the_kernels(
    seen: dict[str, list[Any]],
) -> None:
    assert "fake in a trial" not in seen
    assert seen["fake in a trial ended"] == [lazy.NEEDS_KERNELS]
    assert seen["fake in a trial once there"] == ["imported"]
    assert seen["compiled in a trial once there"] == ["compiled"]


def test_a_trial_that_failed_for_a_missing_kernel_ends_so_and_no_other_failure_does(
    seen: dict[str, list[Any]],
) -> None:
    assert seen["missing in a trial"] == ["failed"]
    assert seen["missing in a trial ended"] == [lazy.NEEDS_KERNELS]


@pytest.mark.parametrize("case", ["compiled", "module"])
def test_what_asks_for_the_compiler_gets_it_whole(case: str, seen: dict[str, list[Any]]) -> None:
    assert seen[case] == [[True, True]]


def test_what_looks_at_all_modules_imports_nothing(seen: dict[str, list[Any]]) -> None:
    assert seen["looked at"] == [[False, True, False]]


def test_modules_for_sharding_are_imported_without_the_compiler(seen: dict[str, list[Any]]) -> None:
    assert seen["sharding"] == [[False, "torch.distributed.fsdp"]]


def test_a_module_of_the_compiler_is_loaded_once(seen: dict[str, list[Any]]) -> None:
    assert seen["module of the compiler"] == [[1, True, True]]


def test_a_function_that_was_kept_from_the_compiler_stays_so_once_there_is_one(
    seen: dict[str, list[Any]],
) -> None:
    assert seen["kept out"] == [[0.0, "Unsupported"]]


def test_a_trial_ends_where_the_compiler_would_have_to_be_imported(
    seen: dict[str, list[Any]],
) -> None:
    assert seen["trial"] == ["trained"]
    assert seen["trial ended"] == [75]


def test_a_trial_ends_where_the_compilers_backend_would_have_to_be_imported(
    seen: dict[str, list[Any]],
) -> None:
    assert seen["backend"] == ["compiled"]
    assert seen["backend ended"] == [76]
    assert seen["backend there"] == ["imported"]
