"""The cards that a virtual GPU can stand in for.

The figures are in `cards.csv`, each with its source. A card's total is what CUDA reports, which is
less than the size on the box, and depends on the driver: the catalogue takes the newest Linux
reading that was found, and names others beside it. Newer drivers keep 100 to 190 MiB more of the
GeForce and GDDR cards; ECC takes about 6 % of a GDDR card; Windows shows nearly the whole board.
"""

from __future__ import annotations

import csv
import difflib
import re
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Final

from memfit.errors import UsageError
from memfit.units import MIB, format_bytes

DEFAULT_CARD: Final = "rtx-4090"
"""The card that stands in where the user names none."""
LATER_KERNELS_MIB: Final = (100, 300)
"""What kernels that a training run loads add to a context (readings of several cards)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Where each figure of a card comes from."""

    total: str
    total_driver: str
    """The driver under which the total was read; it is another under another driver."""
    total_others: str
    """Older, newer and other readings of the total."""
    sms: str
    shared_memory: str
    l2: str
    context: str | None
    """None where the context is an estimate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """One card, as its driver describes it."""

    name: str
    """CUDA's name."""
    slug: str
    """Short name for the command line and for files."""
    aliases: tuple[str, ...]
    total_bytes: int
    """Total memory, as CUDA reports it."""
    compute_capability: str
    """Such as `8.9`."""
    sms: int
    """Streaming multiprocessors."""
    smem_per_sm_bytes: int
    smem_optin_bytes: int
    """The most shared memory that one block may ask for."""
    l2_bytes: int
    context_bytes: int | None
    """Memory that a CUDA context takes, where it was read from a card; else None."""
    sources: Sources
    file: str | None = None
    """The user's own file that describes the card, or None for a card of the catalogue."""

    @property
    def capability(self) -> tuple[int, int]:
        """The compute capability as two numbers."""
        major, minor = self.compute_capability.split(".")
        return int(major), int(minor)

    @property
    def source(self) -> str:
        """Where the card's description comes from, in a few words."""
        if self.file is not None:
            return f"the user's card file {self.file}: {self.sources.total}"
        return f"memfit's catalogue; total: {self.sources.total}"

    @property
    def shown_name(self) -> str:
        """The name for results: a user's own description of a card is told from the catalogue's."""
        return self.name if self.file is None else f"{self.name} as {self.file} describes it"


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What is charged for the CUDA context of a card, and how sure that is."""

    charged_bytes: int
    low_bytes: int
    high_bytes: int
    """Between these a bare context lies; equal where one was read."""
    read: bool
    """Whether it was read from a card; else it is an estimate."""
    source: str


@cache
def cards() -> tuple[Card, ...]:
    """Return all cards, in the catalogue's order."""
    text = resources.files("memfit.virtual").joinpath("cards.csv").read_text("utf-8")
    return tuple(_card(row) for row in csv.DictReader(text.splitlines()))


def _card(row: dict[str, str]) -> Card:
    return Card(
        name=row["name"],
        slug=row["slug"],
        aliases=tuple(row["aliases"].split("|")) if row["aliases"] else (),
        total_bytes=int(row["total_bytes"]),
        compute_capability=row["compute_capability"],
        sms=int(row["sms"]),
        smem_per_sm_bytes=int(row["smem_per_sm_bytes"]),
        smem_optin_bytes=int(row["smem_optin_bytes"]),
        l2_bytes=int(row["l2_bytes"]),
        context_bytes=int(row["context_bytes"]) if row["context_bytes"] else None,
        sources=Sources(
            total=row["total_source"],
            total_driver=row["total_driver"],
            total_others=row["total_others"],
            sms=row["sms_source"],
            shared_memory=row["smem_source"],
            l2=row["l2_source"],
            context=row["context_source"] or None,
        ),
    )


def _plain(name: str) -> str:
    """Reduce a name to what people agree on: no case, spaces, dashes, brands."""
    return re.sub(r"nvidia|geforce|tesla|virtual|[^a-z0-9]", "", name.lower())


@cache
def _by_name() -> dict[str, Card]:
    return {
        _plain(word): card for card in cards() for word in (card.slug, card.name, *card.aliases)
    }


def find_card(name: str) -> Card:
    """Return the card of a name, a slug or an alias, or the one that a file describes.

    Case, spaces, dashes and the words NVIDIA, GeForce and Tesla make no difference. A word that
    ends in `.json` or has a slash is the path of a card file.

    Raises:
        UsageError: When no card has that name, or the file does not describe one.
    """
    if names_file(name):
        from memfit.virtual.card_file import read_card_file  # noqa: PLC0415 - it knows this module

        return read_card_file(name)
    found = _by_name().get(_plain(name))
    if found is not None:
        return found
    slugs = near_slugs(name)
    hint = f"did you mean {' or '.join(slugs)}?" if slugs else "`memfit gpus` lists the cards"
    raise UsageError(f"there is no virtual GPU named {name!r}", hint=hint)


def names_file(word: str) -> bool:
    """Return whether a word where a card is expected is the path of a card file."""
    return "/" in word or word.strip().lower().endswith(".json")


def near_slugs(name: str) -> list[str]:
    """Return the slugs of up to three cards whose names are like a word, the nearest first."""
    near = difflib.get_close_matches(_plain(name), _by_name(), n=6, cutoff=0.5)
    return list(dict.fromkeys(_by_name()[word].slug for word in near))[:3]


def context_charge(card: Card) -> tuple[int, str]:
    """Return the bytes charged for the CUDA context, and where the figure comes from.

    A context read from a card is a floor: it grows as kernels are loaded.
    """
    context = context_of(card)
    if context.read:
        size = format_bytes(context.charged_bytes)
        if card.file is not None:
            return context.charged_bytes, f"{size}, which the card file {card.file} gives"
        return (
            context.charged_bytes,
            f"{size}, read from a card of this kind with few kernels loaded",
        )
    mib, low, high = (
        size // MIB for size in (context.charged_bytes, context.low_bytes, context.high_bytes)
    )
    return context.charged_bytes, (
        f"{mib} MiB, an estimate from cards of similar size and generation ({low} to {high} MiB); "
        "no reading of this card's context was found"
    )


def context_of(card: Card) -> Context:
    """Return what is charged for a card's context, and how sure that is."""
    if card.context_bytes is not None:
        return Context(
            charged_bytes=card.context_bytes,
            low_bytes=card.context_bytes,
            high_bytes=card.context_bytes,
            read=True,
            source=card.sources.context or card.sources.total,
        )
    low, charged, high = _estimated_context_mib(card)
    return Context(
        charged_bytes=charged * MIB,
        low_bytes=low * MIB,
        high_bytes=high * MIB,
        read=False,
        source="an estimate from the cards that were read, by generation and multiprocessors",
    )


def _estimated_context_mib(card: Card) -> tuple[int, int, int]:
    """Estimate a context from the cards that were read: it grows with multiprocessors.

    Returns:
        The least, the one that is charged, and the most.
    """
    major, _ = card.capability
    if major >= 10:  # noqa: PLR2004
        return 600, 650, 700  # a B300 and a B200 were read at 600 and 700
    if major == 9:  # noqa: PLR2004
        return 500, 550, 600
    if card.sms <= 46:  # noqa: PLR2004
        return 200, 300, 400  # cards that were not named were read at 200 to 430
    if card.sms <= 84:  # noqa: PLR2004
        return 350, 400, 430
    return 430, 460, 480  # an RTX 6000 Ada and A100s were read at 426 to 480
