"""Stubs for the functions of NVIDIA's libraries that have no code of their own in `driver/`.

PyTorch's libraries import some 700 functions of the CUDA runtime and the math libraries. Those that
matter for memory are written by hand; for every other one a stub is generated from the prototype in
the headers that the installed packages carry. A stub returns success, clears the scalars that it
was to fill in, and hands out tokens for handles. One that had to invent a result counts its calls,
so that a trial can say which results were not real. Kernel launches and computations invent
nothing: their results are device memory, whose values are unknown anyway.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

_IMPORTED = re.compile(
    r"_*(cuda[A-Z]|cublas|cudnn|nccl|cu[A-Z]|cufft|curand|cusolver|cusparse|nvml|cupti)\w*"
)
_HEADERS = re.compile(
    r"(cublas|cudnn|cufft|cufile|cupti|curand|cusolver|cusparse|nccl|cuda_runtime_api|cuda_profiler_api)"
    r"\w*\.h|cuda\.h"
)
_WHOLE = re.compile(r"(cuda_runtime_api|cuda)\.h")
"""Headers whose every function gets a stub, since other extensions may call any of them."""

_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)
_DIRECTIVE = re.compile(r"^[ \t]*#[^\n]*(?:\\\n[^\n]*)*", re.MULTILINE)
_VERSIONED = re.compile(r"^#define\s+(cu[A-Z]\w+)\s+(\1_v\d)\s*$", re.MULTILINE)
_PROTOTYPE = re.compile(r"\b([A-Za-z_]\w+)\s*\(([^(){};]*)\)\s*(?:;|__attribute)")
_ENUM = re.compile(r"\benum\s+(?:__\w+\s+)?(\w+)?\s*\{[^}]*\}\s*(\w+)?\s*;")
_DEFINED = re.compile(r"^API [^;{(]*?(\w+)\(", re.MULTILINE)

_SCALARS = {
    "int": "int",
    "int32_t": "int",
    "unsigned": "unsigned",
    "unsigned int": "unsigned",
    "uint32_t": "unsigned",
    "size_t": "size_t",
    "long long": "long long",
    "long long int": "long long",
    "int64_t": "long long",
    "unsigned long long": "unsigned long long",
    "uint64_t": "unsigned long long",
    "cuuint32_t": "unsigned",
    "cuuint64_t": "unsigned long long",
    "CUdevice": "int",
    "CUdeviceptr": "unsigned long long",
    "cufftHandle": "int",
    "cudaGraphConditionalHandle": "unsigned long long",
}
_MAKES_HANDLE = re.compile(r"Create|Init$|Init_v2|Get\w*Handle|PlanMany|Plan1d|Subscribe")
_HANDLE = re.compile(r"(_t|Handle|Prop)$|^CU[a-z]\w*$")
_FILLS_POINTER = re.compile(r"Get|Create|Alloc|Host|Map|Load|Import|Open")
_COMPUTES = re.compile(
    r"(cublas|cusolver|cusparse|cufft|curand|cudnn)(?!\w*(Create|Destroy|[SG]et[A-Z]|Size))"
)
"""Functions that write to device memory whose address they are given."""
_OUTPUT_NAME = re.compile(r"handle|out", re.IGNORECASE)


def imported(libraries: Iterable[Path]) -> set[str]:
    """Return the names of NVIDIA's functions that the libraries import.

    Raises:
        OSError: When `nm` is missing.
        subprocess.CalledProcessError: When `nm` fails.
    """
    names: set[str] = set()
    for library in libraries:
        listing = subprocess.run(
            ["nm", "-D", "--undefined-only", str(library)],
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for line in listing.splitlines():
            name = line.split()[-1].partition("@")[0]
            if _IMPORTED.fullmatch(name):
                names.add(name)
    return names


def defined(sources: Iterable[Path]) -> set[str]:
    """Return the names of the functions that hand-written sources export."""
    return {name for source in sources for name in _DEFINED.findall(source.read_text("utf-8"))}


def headers(directories: Iterable[Path]) -> list[Path]:
    """Return the headers that hold prototypes, in a fixed order."""
    return sorted(
        header
        for directory in directories
        for header in directory.glob("*.h")
        if _HEADERS.fullmatch(header.name)
    )


@dataclass(frozen=True, slots=True)
class Prototypes:
    """What the headers say about functions."""

    arguments: dict[str, list[str]] = field(default_factory=dict)
    """The arguments of each function."""
    whole: set[str] = field(default_factory=set)
    """The functions of the headers whose every function gets a stub."""
    enums: set[str] = field(default_factory=set)
    """Types that are enumerations, and so as large as an int."""


def prototypes(files: Sequence[Path]) -> Prototypes:
    """Read the prototypes in headers; the first of several for one function counts."""
    found = Prototypes()
    for file in files:
        text = file.read_text("utf-8", errors="replace")
        plain = _DIRECTIVE.sub("", _COMMENT.sub(" ", text))
        here = dict(_PROTOTYPE.findall(plain))
        for name, newer in _VERSIONED.findall(text):
            if name in here:
                here.setdefault(newer, here[name])
        for name, arguments in here.items():
            found.arguments.setdefault(name, _split(arguments))
        found.enums.update(name for pair in _ENUM.findall(plain) for name in pair if name)
        if _WHOLE.fullmatch(file.name):
            found.whole.update(name for name in here if _IMPORTED.fullmatch(name))
    return found


def _split(arguments: str) -> list[str]:
    parts = [re.sub(r"=.*", "", part).strip() for part in arguments.split(",")]
    return [part for part in parts if part not in ("", "void")]


def generate(names: Iterable[str], known: Prototypes) -> str:
    """Write the C source of stubs for the functions that need one."""
    lines = [
        "/* Generated by memfit from the installed headers. */",
        "#include <stddef.h>",
        '#include "vgpu.h"',
    ]
    lines += [_stub(name, known) for name in sorted(names)]
    return "\n".join(lines) + "\n"


def _stub(name: str, known: Prototypes) -> str:
    arguments = known.arguments.get(name)
    if arguments is None:
        return f"API long {name}(void) {{ {_noted(name)} return 0; }}"
    declared: list[str] = []
    body: list[str] = []
    invented = False
    for index, text in enumerate(arguments):
        argument = _Argument.read(text)
        if argument.pointers == 0 and argument.kind in ("float", "double"):
            declared.append(f"{argument.kind} a{index}")
            continue
        declared.append(f"void *a{index}")
        if "Launch" in name:
            continue  # what a launch is given belongs to the caller
        scalar = "int" if argument.kind in known.enums else _SCALARS.get(argument.kind)
        if scalar is not None and argument.is_output:
            body.append(f"if (a{index}) *({scalar} *)a{index} = 0;")
            invented = True
        elif index <= 1 and _MAKES_HANDLE.search(name) and argument.is_handle_output:
            body.append(f"if (a{index}) *(void **)a{index} = token();")
        elif argument.is_pointer_output(index, name):
            body.append(f"if (a{index}) *(void **)a{index} = NULL;")
            invented = True
    if invented:
        body.insert(0, _noted(name))
    if _COMPUTES.match(name):
        given = ", ".join(f"a{index}" for index, text in enumerate(declared) if "*" in text)
        count = given.count("a")
        body.append(f"arguments_listed((void *[]){{{given}}}, {count});" if given else "")
    return f"API long {name}({', '.join(declared) or 'void'}) {{ {' '.join(body)} return 0; }}"


def _noted(name: str) -> str:
    return f'static int seen; note_unknown("{name}", &seen);'


@dataclass(frozen=True, slots=True, kw_only=True)
class _Argument:
    """One argument of a prototype."""

    kind: str
    """The bare type: `size_t`, `cufftHandle`."""
    name: str
    pointers: int
    constant: bool
    array: bool

    @classmethod
    def read(cls, text: str) -> Self:
        text = re.sub(r"\b(CUDAAPI|__dv\([^)]*\))", "", text)
        before, star, after = text.partition("*")
        words = re.sub(r"\b(const|struct|enum|restrict)\b", "", before).split()
        name = re.sub(r"\W|\bconst\b", "", after) if star else ""
        if not star and len(words) > 1:
            name = words.pop()
        return cls(
            kind=" ".join(words),
            name=name,
            pointers=text.count("*"),
            constant="const" in text,
            array="[" in text,
        )

    @property
    def is_output(self) -> bool:
        return self.pointers == 1 and not self.array and not self.constant

    @property
    def is_handle_output(self) -> bool:
        return self.is_output and bool(_HANDLE.search(self.kind))

    def is_pointer_output(self, index: int, function: str) -> bool:
        """Tell whether a pointer comes back here; a `const` speaks of what it points to."""
        first = index <= 1 and bool(_FILLS_POINTER.search(function))
        named = bool(_OUTPUT_NAME.search(self.name))
        return self.pointers == 2 and not self.array and (first or named)  # noqa: PLR2004
