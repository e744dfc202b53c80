"""Building the stand-in driver once per torch build, into a cache of the user."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from memfit.errors import CannotJudge
from memfit.virtual import stubs

_DRIVER = Path(__file__).parent / "driver"
_SUPPORTED_CUDA = (12, 13)
_LIBRARY = "libcuda.so.1"
"""The driver's own name, so that whoever asks for the driver by name gets this library."""

_HAND_WRITTEN_FLAGS = ("-O2", "-Wall", "-Wextra", "-Werror")
_COMMON_FLAGS = ("-std=gnu11", "-fPIC", "-fvisibility=hidden", "-pthread")


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchBuild:
    """The installed torch, as far as its files tell without importing it."""

    version: str
    cuda: str | None
    """Such as `13.0`; None for a build without CUDA."""
    root: Path
    """The package's folder."""

    @property
    def site(self) -> Path:
        """The folder that holds torch and NVIDIA's packages."""
        return self.root.parent

    @property
    def cuda_major(self) -> int:
        """CUDA's major version."""
        assert self.cuda is not None
        return int(self.cuda.partition(".")[0])

    @property
    def cuda_number(self) -> int:
        """CUDA's version as its own functions return it: 13000 for 13.0."""
        assert self.cuda is not None
        major, minor = (int(part) for part in (*self.cuda.split("."), "0")[:2])
        return major * 1000 + minor * 10


def find_torch() -> TorchBuild | None:
    """Return the installed torch, or None; torch is not imported."""
    try:
        spec = importlib.util.find_spec("torch")
    except (ImportError, ValueError):
        return None
    if spec is None or spec.origin is None:
        return None
    return read_torch(Path(spec.origin).parent)


def read_torch(root: Path) -> TorchBuild | None:
    """Read what torch in a folder is, or return None when its version cannot be read."""
    try:
        text = (root / "version.py").read_text("utf-8")
    except OSError:
        return None
    version = re.search(r"^__version__\s*=\s*['\"]([^'\"]+)", text, re.MULTILINE)
    cuda = re.search(r"^cuda\b[^=\n]*=\s*['\"]([^'\"]+)", text, re.MULTILINE)
    return TorchBuild(
        version=version[1] if version else "unknown", cuda=cuda[1] if cuda else None, root=root
    )


def unavailable_reason() -> str | None:
    """Return why no virtual GPU can run here, in one sentence, or None when one can."""
    reason = _obstacle()
    return None if reason is None else reason[0]


def _obstacle() -> tuple[str, str] | None:
    """Return what stands in the way and what to do about it, or None."""
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "AMD64"):
        here = f"{platform.system()} on {platform.machine()}"
        return (
            f"the virtual GPU runs on Linux x86-64, and this is {here}",
            "use --device cpu here, or a Linux x86-64 machine or container",
        )
    torch = find_torch()
    if torch is None:
        return ("PyTorch is not installed", "install torch with CUDA: pip install torch")
    if torch.cuda is None:
        return (
            f"torch {torch.version} was built without CUDA, which the virtual GPU needs",
            "install a CUDA build of torch (no GPU is needed): "
            "pip install torch --index-url https://download.pytorch.org/whl/cu130",
        )
    if torch.cuda_major not in _SUPPORTED_CUDA:
        return (
            f"torch {torch.version} uses CUDA {torch.cuda}; the virtual GPU needs CUDA 12 or 13",
            "install a torch that is built with CUDA 12 or 13",
        )
    for program in ("cc", "nm"):
        if shutil.which(program) is None:
            return (
                f"there is no {program}, which builds the virtual GPU's driver on first use",
                "install a C compiler: apt-get install gcc, or dnf install gcc",
            )
    return None


def cache_folder() -> Path:
    """Return the folder that built drivers are kept in."""
    if own := os.environ.get("MEMFIT_CACHE"):
        return Path(own)
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "memfit"
    try:
        return Path.home() / ".cache" / "memfit"
    except RuntimeError:
        raise CannotJudge(
            "there is no home folder to keep the virtual GPU's driver in",
            hint="set MEMFIT_CACHE to a writable folder",
        ) from None


def driver_folder() -> Path:
    """Return the folder of the built driver, building it first where it is missing.

    Raises:
        CannotJudge: When it cannot be built here.
    """
    torch, folder = _place()
    if not (folder / _LIBRARY).exists():
        _build_into(folder, torch)
    return folder


def built_driver_folder() -> Path | None:
    """Return the folder of the driver where it is built already."""
    try:
        _, folder = _place()
    except CannotJudge:
        return None
    return folder if (folder / _LIBRARY).exists() else None


def _place() -> tuple[TorchBuild, Path]:
    """Return the torch that the driver is for, and the folder that it is or will be in."""
    obstacle = _obstacle()
    if obstacle is not None:
        raise CannotJudge(obstacle[0], hint=obstacle[1])
    torch = find_torch()
    assert torch is not None
    cache = cache_folder()
    folder = cache.absolute() / f"driver-{_key(torch)}"
    if ":" in str(folder) or ";" in str(folder):
        raise CannotJudge(
            f"the driver's cache at {cache} has a colon or semicolon in its path",
            hint="set MEMFIT_CACHE to a folder without one",
        )
    return torch, folder


def _key(torch: TorchBuild) -> str:
    """Return a digest of everything that the driver is made from."""
    digest = hashlib.sha256()
    for text in (torch.version, str(torch.cuda), _compiler_version()):
        digest.update(text.encode())
    for path in (*_torch_libraries(torch), *_nvidia_packages(torch)):
        status = path.stat()
        digest.update(f"{path}:{status.st_size}:{status.st_mtime_ns}".encode())
    for source in (*sorted(_DRIVER.iterdir()), Path(stubs.__file__), Path(__file__)):
        if source.is_file():
            digest.update(source.read_bytes())
    return digest.hexdigest()[:20]


def _compiler_version() -> str:
    try:
        return subprocess.run(
            ["cc", "--version"], check=True, capture_output=True, text=True
        ).stdout.partition("\n")[0]
    except (OSError, subprocess.CalledProcessError) as error:
        raise CannotJudge(
            f"the C compiler cc does not run: {error}", hint="install a working C compiler"
        ) from None


def _torch_libraries(torch: TorchBuild) -> list[Path]:
    return sorted((torch.root / "lib").glob("*.so"))


def _nvidia_packages(torch: TorchBuild) -> list[Path]:
    """Return the metadata folders of NVIDIA's packages: their names hold the versions."""
    return sorted(torch.site.glob("nvidia_*.dist-info"))


def _header_folders(torch: TorchBuild) -> list[Path]:
    folders = [folder for folder in torch.site.glob("nvidia/*/include") if folder.is_dir()]
    triton = torch.site / "triton" / "backends" / "nvidia" / "include"
    return [*sorted(folders), *([triton] if triton.is_dir() else [])]


def _nccl_number(torch: TorchBuild) -> int:
    """Return NCCL's version as its own function returns it: 23007 for 2.30.7."""
    for package in _nvidia_packages(torch):
        found = re.match(r"nvidia_nccl_cu\d+-(\d+)\.(\d+)\.(\d+)", package.name)
        if found:
            major, minor, patch = (int(part) for part in found.groups())
            return major * 10000 + minor * 100 + patch
    return 22000


def _build_into(folder: Path, torch: TorchBuild) -> None:
    """Build the driver beside its place and rename it there, so that no half of it is ever seen."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=".building-", dir=folder.parent))
    except OSError:
        raise CannotJudge(
            f"cannot write the driver's cache at {folder.parent}",
            hint="set MEMFIT_CACHE to a writable folder",
        ) from None
    try:
        _compile(scratch, torch)
        scratch.chmod(0o755)
        try:
            scratch.rename(folder)
        except OSError:
            if not (folder / _LIBRARY).exists():  # otherwise another process was first
                raise
    except OSError as error:
        raise CannotJudge(
            f"cannot write the driver's cache at {folder.parent}: {error.strerror}",
            hint="set MEMFIT_CACHE to a writable folder",
        ) from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _compile(folder: Path, torch: TorchBuild) -> None:
    sources = sorted(_DRIVER.glob("*.c"))
    known = stubs.prototypes(stubs.headers(_header_folders(torch)))
    if not known.whole:
        raise CannotJudge(
            f"CUDA's headers are not in {torch.site / 'nvidia'}, where torch's wheels bring them",
            hint="install torch with pip, which also installs NVIDIA's packages",
        )
    try:
        needed = stubs.imported(_torch_libraries(torch)) | known.whole
    except subprocess.CalledProcessError as error:
        raise CannotJudge(
            "nm cannot read the libraries of torch",
            hint="reinstall torch and binutils",
            details=str(error.stderr),
        ) from None
    generated = folder / "stubs.c"
    generated.write_text(stubs.generate(needed - stubs.defined(sources), known), "utf-8")
    flags = [
        *_COMMON_FLAGS,
        f"-DVGPU_CUDA_MAJOR={torch.cuda_major}",
        f"-DVGPU_CUDA_VERSION={torch.cuda_number}",
        f"-DVGPU_NCCL_VERSION={_nccl_number(torch)}",
    ]
    objects = []
    for source in (*sources, generated):
        warnings = ("-O1", "-w", f"-I{_DRIVER}") if source == generated else _HAND_WRITTEN_FLAGS
        objects.append(folder / f"{source.stem}.o")
        _run(["cc", *flags, *warnings, "-c", str(source), "-o", str(objects[-1])])
    library = folder / _LIBRARY
    soname = f"-Wl,-soname,{_LIBRARY}"
    _run(["cc", "-shared", "-pthread", soname, "-o", str(library), *map(str, objects), "-ldl"])
    _make_nvml(folder, library)
    (folder / "libcuda.so").symlink_to(_LIBRARY)
    for leftover in (generated, *objects):
        leftover.unlink()


def _make_nvml(folder: Path, library: Path) -> None:
    """Make the library that monitoring tools open by name: empty, and leaning on the driver.

    A copy of the driver would have an account of its own and report other figures than CUDA does.
    """
    empty = folder / "nvml.c"
    empty.write_text("", "utf-8")
    link = ("-Wl,-soname,libnvidia-ml.so.1", "-Wl,--no-as-needed", "-Wl,-rpath,$ORIGIN")
    target = str(folder / "libnvidia-ml.so.1")
    _run(["cc", "-shared", "-fPIC", *link, "-o", target, str(empty), str(library)])
    empty.unlink()


def _run(command: list[str]) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise CannotJudge(
            f"the virtual GPU's driver does not build with {_compiler_version()}",
            hint="please report this with the details",
            details=f"{' '.join(command)}\n{done.stderr}",
        )
