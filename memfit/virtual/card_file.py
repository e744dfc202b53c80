"""A user's own card: a small JSON file that describes a GPU which the catalogue does not have.

`memfit gpus --from-this-machine` writes one from a real card; it may also be written by hand:

    {
      "schema": "memfit.card",
      "schema_version": 1,
      "name": "NVIDIA H200",
      "read_from": "card",
      "total_bytes": 150109945856,
      "compute_capability": "9.0",
      "sms": 132,
      "smem_per_sm_bytes": 233472,
      "smem_optin_bytes": 232448,
      "l2_bytes": 62914560,
      "context_bytes": 576716800,
      "source": "torch 2.14.1+cu130 with driver 580.65.06"
    }

`context_bytes` may be null or left out: it is then estimated. `read_from` is `card`, `virtual` (the
figures were read from a virtual GPU and say nothing of a real one) or `hand`, which it also is when
left out. What the file says ends up in the driver's description and in reports, so it is read with
suspicion: every fault is one clear error.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, NoReturn

from memfit.errors import UsageError
from memfit.units import GIB, KIB, MIB, TIB, format_bytes
from memfit.virtual.catalogue import Card, Sources, near_slugs

SCHEMA: Final = "memfit.card"
SCHEMA_VERSION: Final = 1
VIRTUAL_MARK: Final = " (virtual)"
"""What the driver adds to the name of every card that it stands in for."""

_MOST_FILE_BYTES: Final = 64 * KIB
_MOST_NAME: Final = 100
_MOST_SOURCE: Final = 500
_ALLOWED_NAME: Final = re.compile(r"[A-Za-z0-9 ._()/+-]+")
"""The driver's description separates its fields by semicolons, and cuDNN's puts names in quotes."""
_CAPABILITY: Final = re.compile(r"(\d{1,2})\.(\d)")
_CAPABILITIES: Final = ((7, 0), (12, 9))
"""The oldest and the newest compute capability that the stand-in driver knows about."""

_SAME: Final = "the file"

ReadFrom = Literal["card", "virtual", "hand"]
_READ_FROM: Final[dict[str, ReadFrom]] = {"card": "card", "virtual": "virtual", "hand": "hand"}


@dataclass(frozen=True, slots=True)
class _Range:
    """Least and most of a whole number."""

    least: int
    most: int
    sizes: bool = True

    def words(self) -> str:
        """Write the range for people."""
        if self.sizes:
            return f"{format_bytes(self.least)} to {format_bytes(self.most)}"
        return f"{self.least} to {self.most}"


_NUMBERS: Final = {
    "total_bytes": _Range(64 * MIB, TIB),
    "sms": _Range(1, 1024, sizes=False),
    "smem_per_sm_bytes": _Range(48 * KIB, MIB),
    "smem_optin_bytes": _Range(48 * KIB, MIB),
    "l2_bytes": _Range(64 * KIB, GIB),
}
"""What must be there, and what the stand-in driver takes."""
_TEXTS: Final = ("name", "compute_capability", "source")
_OPTIONAL: Final = ("context_bytes", "read_from")
_FIELDS: Final = ("schema", "schema_version", *_TEXTS, *_NUMBERS, *_OPTIONAL)


@dataclass(frozen=True, slots=True, kw_only=True)
class CardReading:
    """What a machine says of its own card."""

    name: str
    read_from: ReadFrom
    total_bytes: int
    compute_capability: str
    sms: int
    smem_per_sm_bytes: int
    smem_optin_bytes: int
    l2_bytes: int
    context_bytes: int | None
    source: str


def write_card(reading: CardReading) -> str:
    """Write a card file's text."""
    document = {
        "schema": SCHEMA,
        "schema_version": SCHEMA_VERSION,
        "name": reading.name,
        "read_from": reading.read_from,
        "total_bytes": reading.total_bytes,
        "compute_capability": reading.compute_capability,
        "sms": reading.sms,
        "smem_per_sm_bytes": reading.smem_per_sm_bytes,
        "smem_optin_bytes": reading.smem_optin_bytes,
        "l2_bytes": reading.l2_bytes,
        "context_bytes": reading.context_bytes,
        "source": reading.source,
    }
    return json.dumps(document, indent=2) + "\n"


def read_card_file(word: str) -> Card:
    """Read a user's card file.

    Args:
        word: The path, as the user wrote it.

    Raises:
        UsageError: When there is no such file, or at its first fault.
    """
    return parse_card(word, _read(word))


def parse_card(word: str, data: bytes) -> Card:
    """Make a card of what a file holds.

    Raises:
        UsageError: At the first fault; it names the file as `word`.
    """
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        _refuse(word, f"byte {error.start} is not UTF-8")
    document = _parse(word, text)
    _check_fields(word, document)
    return _card(word, document, digest=hashlib.sha256(data).hexdigest()[:6])


def _refuse(word: str, why: str, hint: str | None = None) -> NoReturn:
    raise UsageError(
        f"the card file {_safe(word)} is refused: {why}",
        hint=hint or "`memfit gpus --from-this-machine` writes one to start from",
    )


def _safe(text: str, most: int = 120) -> str:
    """Write a text that nobody has checked so that a terminal shows it and does not obey it."""
    shown = "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text)
    return shown if len(shown) <= most else f"{shown[:most]}…"


def _read(word: str) -> bytes:
    path = Path(word).expanduser()
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            kind = "a folder" if stat.S_ISDIR(status.st_mode) else "no ordinary file"
            _refuse(word, f"it is {kind}")
        with path.open("rb") as file:
            data = file.read(_MOST_FILE_BYTES + 1)
    except FileNotFoundError:
        raise UsageError(f"there is no card file {_safe(word)}", hint=_instead_of(path)) from None
    except (OSError, RuntimeError, ValueError) as error:  # also a home or a name that cannot be
        _refuse(word, getattr(error, "strerror", None) or str(error))
    if len(data) > _MOST_FILE_BYTES:
        _refuse(word, f"it is larger than {format_bytes(_MOST_FILE_BYTES)}")
    return data


def _instead_of(path: Path) -> str:
    """Name the file or the card that a path which is not there may have meant."""
    try:
        files = [p.name for p in path.parent.iterdir() if p.suffix.lower() == ".json"]
    except OSError:
        files = []
    near = difflib.get_close_matches(path.name, sorted(files), n=1, cutoff=0.6)
    if near:
        return f"did you mean {_safe(str(path.with_name(near[0])))}?"
    slugs = near_slugs(path.stem)
    if slugs:
        return f"did you mean the card {' or '.join(slugs)}, which needs no file?"
    return "`memfit gpus` lists the cards that need no file"


def _parse(word: str, text: str) -> dict[str, Any]:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            _refuse(word, f"{_safe(twice)} is given twice")
        return found

    def constant(name: str) -> NoReturn:
        _refuse(word, f"{name} is no JSON")

    try:
        document = json.loads(text, object_pairs_hook=once, parse_constant=constant)
    except json.JSONDecodeError as error:
        _refuse(word, f"it is no JSON: {error.msg} (line {error.lineno})")
    except (ValueError, RecursionError):
        _refuse(word, "it is no JSON that anyone would write: too deep, or a number too long")
    if not isinstance(document, dict):
        _refuse(word, f"it holds {_kind(document)} instead of an object")
    return document


def _check_fields(word: str, document: dict[str, Any]) -> None:
    if document.get("schema") != SCHEMA:
        shown = _safe(repr(document["schema"])) if "schema" in document else "missing"
        _refuse(word, f'its schema is {shown}, not "{SCHEMA}"')
    version = document.get("schema_version")
    if type(version) is not int or version != SCHEMA_VERSION:
        _refuse(
            word,
            f"its schema_version is {_safe(repr(version))}, and this memfit reads {SCHEMA_VERSION}",
        )
    for name in document:
        if name not in _FIELDS:
            near = difflib.get_close_matches(name, _FIELDS, n=1)
            also = f"did you mean {near[0]}?" if near else f"the fields are {', '.join(_FIELDS)}"
            _refuse(word, f"it has no use for a field {_safe(name)!r}", also)
    for name in (*_TEXTS, *_NUMBERS):
        if name not in document:
            _refuse(word, f"{name} is missing")


def _card(word: str, document: dict[str, Any], *, digest: str) -> Card:
    numbers = {name: _number(word, document, name, known) for name, known in _NUMBERS.items()}
    name = _name(word, document)
    capability = _capability(word, document)
    context = None
    if document.get("context_bytes") is not None:
        context = _number(word, document, "context_bytes", _Range(0, TIB))
        if context >= numbers["total_bytes"]:
            _refuse(
                word,
                f"its total_bytes ({format_bytes(numbers['total_bytes'])}) is not above its "
                f"context_bytes ({format_bytes(context)})",
            )
    if numbers["smem_optin_bytes"] > numbers["smem_per_sm_bytes"]:
        _refuse(
            word,
            f"smem_optin_bytes ({numbers['smem_optin_bytes']}) is above smem_per_sm_bytes "
            f"({numbers['smem_per_sm_bytes']}), and a block runs on one multiprocessor",
        )
    file = _safe(Path(word).name, 60)
    said = _source(word, document)
    return Card(
        name=name,
        slug=_slug(word, digest),
        aliases=(),
        compute_capability=capability,
        context_bytes=context,
        sources=Sources(
            total=said,
            total_driver="the one that this names, if it does",
            total_others="none: a file gives one",
            sms=_SAME,
            shared_memory=_SAME,
            l2=_SAME,
            context=_SAME if context is not None else None,
        ),
        file=file,
        **numbers,
    )


def _number(word: str, document: dict[str, Any], name: str, known: _Range) -> int:
    value = document[name]
    if type(value) is not int:  # a truth value is an int to Python
        _refuse(word, f"{name} is {_kind(value)}, and a whole number is wanted")
    if not known.least <= value <= known.most:
        _refuse(word, f"{name} is {_safe(str(value), 40)}, which is not within {known.words()}")
    return value


def _text(word: str, document: dict[str, Any], name: str, most: int) -> str:
    value = document[name]
    if not isinstance(value, str):
        _refuse(word, f"{name} is {_kind(value)}, and a text is wanted")
    if not value.strip():
        _refuse(word, f"{name} is empty")
    if len(value) > most:
        _refuse(word, f"{name} has {len(value)} characters, and {most} are allowed")
    return value


def _name(word: str, document: dict[str, Any]) -> str:
    text = _text(word, document, "name", _MOST_NAME)
    odd = _ALLOWED_NAME.sub("", text)
    if odd:
        _refuse(word, f"name holds {_safe(repr(odd[0]))}", "use letters, digits and . _ ( ) / + -")
    name = text.removesuffix(VIRTUAL_MARK).strip()
    if not name:
        _refuse(word, "name is empty")
    return name


def _capability(word: str, document: dict[str, Any]) -> str:
    text = _text(word, document, "compute_capability", 20)
    match = _CAPABILITY.fullmatch(text)
    if match is None or not text.isascii():
        _refuse(word, f'compute_capability is "{_safe(text)}"; it is written as "8.9"')
    least, most = _CAPABILITIES
    if not least <= (int(match[1]), int(match[2])) <= most:
        _refuse(
            word,
            f"compute_capability is {text}, and virtual GPUs are {least[0]}.{least[1]} to "
            f"{most[0]}.{most[1]}",
        )
    return f"{int(match[1])}.{match[2]}"


def _source(word: str, document: dict[str, Any]) -> str:
    said = _text(word, document, "source", _MOST_SOURCE)
    if not said.isprintable():
        _refuse(word, "source holds a control character")
    read_from = document.get("read_from", "hand")
    if not isinstance(read_from, str) or read_from not in _READ_FROM:
        _refuse(word, f"read_from is {_safe(repr(read_from))}; it is {', '.join(_READ_FROM)}")
    if read_from == "virtual" or str(document["name"]).endswith(VIRTUAL_MARK):
        return f"read from a virtual GPU, not from a card: {said}"
    return f"read from a card: {said}" if read_from == "card" else said


def _slug(word: str, digest: str) -> str:
    """Name the card in folders and records; another content of the file is another card."""
    stem = re.sub(r"[^a-z0-9]+", "-", Path(word).stem.lower()).strip("-")[:40] or "card"
    return f"{stem}-{digest}"


def _kind(value: object) -> str:
    kinds = {bool: "true or false", int: "a number", float: "a number with a fraction"}
    kinds |= {str: "a text", list: "a list", dict: "an object", type(None): "null"}
    return kinds.get(type(value), "something else")
