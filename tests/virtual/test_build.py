"""Building the driver, keeping it, and saying why it cannot be built."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from memfit.errors import CannotJudge, UsageError
from memfit.virtual import build, find_card, prepare, stubs, unavailable_reason

CARD = find_card("rtx-4090")
ROOT = Path(__file__).parents[2]


def _fake_torch(tmp_path, cuda):
    root = tmp_path / "torch"
    root.mkdir()
    (root / "version.py").write_text(f"__version__ = '2.9.0'\ncuda: Optional[str] = {cuda!r}\n")
    return build.read_torch(root)


def test_the_interface_imports_neither_torch_nor_pandas():
    code = (
        "import sys, memfit.virtual as v; v.unavailable_reason(); v.cards(); "
        "print([m for m in ('torch', 'pandas', 'matplotlib', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True
    )
    assert done.stdout.strip() == "[]"


def test_a_torch_without_cuda_is_a_reason(tmp_path, monkeypatch):
    torch = _fake_torch(tmp_path, None)
    monkeypatch.setattr(build, "find_torch", lambda: torch)
    assert "built without CUDA" in str(unavailable_reason())
    with pytest.raises(CannotJudge) as caught:
        prepare(CARD, total_bytes=CARD.total_bytes)
    assert "CUDA build of torch" in str(caught.value.hint)


def test_a_torch_of_an_unknown_cuda_is_a_reason(tmp_path, monkeypatch):
    torch = _fake_torch(tmp_path, "11.8")
    monkeypatch.setattr(build, "find_torch", lambda: torch)
    assert "CUDA 11.8" in str(unavailable_reason())


def test_no_torch_is_a_reason(monkeypatch):
    monkeypatch.setattr(build, "find_torch", lambda: None)
    assert unavailable_reason() == "PyTorch is not installed"


def test_no_compiler_is_a_reason(tmp_path, monkeypatch):
    torch = _fake_torch(tmp_path, "13.0")
    monkeypatch.setattr(build, "find_torch", lambda: torch)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "no cc" in str(unavailable_reason())


@pytest.mark.parametrize(("system", "machine"), [("darwin", "arm64"), ("linux", "aarch64")])
def test_another_platform_is_a_reason(monkeypatch, system, machine):
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr("platform.machine", lambda: machine)
    assert "Linux x86-64" in str(unavailable_reason())


def test_the_cache_follows_the_environment(monkeypatch):
    monkeypatch.setenv("MEMFIT_CACHE", "/a")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert build.cache_folder() == Path("/a")
    monkeypatch.delenv("MEMFIT_CACHE")
    assert build.cache_folder() == Path("/b/memfit")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/c")
    assert build.cache_folder() == Path("/c/.cache/memfit")


@pytest.mark.virtual
def test_a_cache_that_cannot_be_written_is_said_in_one_sentence(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(CannotJudge, match="cannot write the driver's cache at") as caught:
        prepare(CARD, total_bytes=CARD.total_bytes)
    assert caught.value.hint == "set MEMFIT_CACHE to a writable folder"


@pytest.mark.virtual
def test_a_cache_path_with_a_colon_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path / "a:b"))
    with pytest.raises(CannotJudge, match="colon"):
        prepare(CARD, total_bytes=CARD.total_bytes)


@pytest.mark.virtual
def test_two_builds_at_once_leave_one_driver_and_nothing_else(tmp_path, monkeypatch):
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path))
    with ThreadPoolExecutor(2) as pool:
        folders = set(pool.map(lambda _: build.driver_folder(), range(2)))
    assert [entry.name for entry in tmp_path.iterdir()] == [folders.pop().name]
    assert not folders


@pytest.mark.virtual
def test_a_built_driver_is_found_again(driver_cache):
    first = build.driver_folder()
    stamp = (first / "libcuda.so.1").stat().st_mtime_ns
    assert build.driver_folder() == first
    assert (first / "libcuda.so.1").stat().st_mtime_ns == stamp


@pytest.mark.virtual
def test_a_folder_with_a_space_in_its_path_works(tmp_path, monkeypatch):
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path / "with space"))
    variables = prepare(CARD, total_bytes=CARD.total_bytes)
    code = "import ctypes as c; print(c.CDLL(None).memfit_vgpu_set_total(c.c_size_t(8 << 30)))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **variables},
        check=True,
        capture_output=True,
        text=True,
    )
    assert (done.stdout.strip(), done.stderr) == ("0", "")


@pytest.mark.virtual
def test_what_the_user_preloads_stays_preloaded(monkeypatch):
    monkeypatch.setenv("LD_PRELOAD", "/opt/lib/libother.so")
    variables = prepare(CARD, total_bytes=CARD.total_bytes)
    assert variables["LD_PRELOAD"].endswith(":/opt/lib/libother.so")


def test_a_size_below_the_context_is_a_wrong_question():
    with pytest.raises(UsageError, match="context"):
        prepare(CARD, total_bytes=100 << 20)


def test_a_size_above_a_tebibyte_is_a_wrong_question():
    with pytest.raises(UsageError, match="1 TiB"):
        prepare(CARD, total_bytes=2 << 40)


@pytest.mark.parametrize("devices", [0, 17])
def test_a_wrong_number_of_devices_is_a_wrong_question(devices):
    with pytest.raises(UsageError, match="1 to 16"):
        prepare(CARD, total_bytes=CARD.total_bytes, devices=devices)


def _stub(name, *arguments, enums=()):
    return stubs.generate([name], stubs.Prototypes({name: list(arguments)}, enums=set(enums)))


def test_a_stub_clears_the_scalars_it_was_to_fill_in():
    text = _stub("cufftGetSize", "cufftHandle plan", "size_t *size")
    assert "if (a1) *(size_t *)a1 = 0;" in text
    assert 'note_unknown("cufftGetSize"' in text


def test_a_stub_clears_an_enumeration_as_an_int():
    text = _stub("cuAsk", "CUstream s", "CUcaptureStatus *status", enums=["CUcaptureStatus"])
    assert "if (a1) *(int *)a1 = 0;" in text


def test_a_stub_hands_out_a_token_for_a_handle():
    text = _stub("cusparseCreate", "cusparseHandle_t* handle")
    assert "*(void **)a0 = token();" in text
    assert "note_unknown" not in text


def test_a_stub_never_writes_more_than_a_number_into_a_handle_that_is_one():
    assert "*(int *)a0 = 0;" in _stub("cufftCreate", "cufftHandle *plan")


def test_a_stub_leaves_what_is_constant():
    assert "=" not in _stub("cublasSetThing", "const int *values").partition("API")[2]


def test_a_stub_of_a_launch_never_writes_through_its_arguments():
    arguments = ["CUfunction f", "unsigned int gridDimX", "void** kernelParams", "int* extra"]
    text = _stub("cuLaunchThing", *arguments)
    assert "= 0;" not in text
    assert "NULL" not in text


def test_prototypes_are_read_from_headers(tmp_path):
    header = tmp_path / "cuda.h"
    header.write_text(
        "/* CUresult cuOld(int); */\n"
        "#define cuThing cuThing_v2\n"
        "typedef enum CUmode_enum { CU_A = 0 } CUmode;\n"
        "CUresult CUDAAPI cuThing(CUmode *mode, size_t bytes);\n"
    )
    found = stubs.prototypes(stubs.headers([tmp_path]))
    assert found.arguments["cuThing_v2"] == ["CUmode *mode", "size_t bytes"]
    assert found.whole == {"cuThing", "cuThing_v2"}
    assert "CUmode" in found.enums
    assert "cuOld" not in found.arguments
