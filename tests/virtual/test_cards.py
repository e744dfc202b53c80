"""A user's own card files: read with suspicion, and every fault is one clear error."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memfit.devices.select import choose, describe
from memfit.errors import CannotJudge, UsageError
from memfit.units import GIB, TIB
from memfit.virtual import cards, context_charge, find_card, prepare
from memfit.virtual.card_file import CardReading, parse_card, write_card
from memfit.virtual.catalogue import context_of
from memfit.virtual.environment import describe as description

GOOD = {
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
    "source": "torch 2.14.1+cu130 with driver 580.65.06",
}


def write(folder, file="card.json", /, **changes):
    path = folder / file
    document = {key: value for key, value in (GOOD | changes).items() if value is not ...}
    path.write_text(json.dumps(document))
    return path


def refusal(path):
    with pytest.raises(UsageError) as caught:
        find_card(str(path))
    assert "\n" not in caught.value.message
    assert caught.value.hint
    return caught.value


def test_a_file_is_a_card_wherever_a_name_is_taken(tmp_path):
    card = find_card(str(write(tmp_path, "My Card.json")))

    assert (card.name, card.total_bytes, card.capability) == ("NVIDIA H200", 150109945856, (9, 0))
    assert card.context_bytes == 576716800
    assert card.slug.startswith("my-card-")
    assert card.source.startswith("the user's card file My Card.json: read from a card: torch 2.14")


def test_a_path_is_known_by_its_ending_or_its_slash(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "card.json")
    write(tmp_path, "h200")

    assert find_card("card.json").file == "card.json"
    assert find_card("./h200").file == "h200"
    assert find_card("h200").file is None


def test_a_file_name_keeps_its_case(tmp_path):
    path = write(tmp_path, "Upper.json")
    try:
        assert choose(str(path)).card == find_card(str(path))
    except CannotJudge as error:
        pytest.skip(error.message)


def test_another_content_is_another_card(tmp_path):
    one = find_card(str(write(tmp_path)))
    other = find_card(str(write(tmp_path, sms=131)))

    assert one.slug != other.slug


def test_results_name_the_file(tmp_path):
    choice = _virtual(find_card(str(write(tmp_path))))
    device = describe(choice, memory_limit=None)

    assert device.name == "NVIDIA H200 as card.json describes it"
    assert device.context_source == "550.00 MiB, which the card file card.json gives"
    assert device.total_bytes == GOOD["total_bytes"]


def test_without_a_context_it_is_estimated(tmp_path):
    for missing in (None, ...):
        card = find_card(str(write(tmp_path, context_bytes=missing)))
        assert "estimate" in context_charge(card)[1]


@pytest.mark.parametrize(
    "changes", [{"read_from": "virtual"}, {"name": "NVIDIA H200 (virtual)", "read_from": "card"}]
)
def test_what_was_read_from_a_virtual_gpu_is_never_called_real(tmp_path, changes):
    card = find_card(str(write(tmp_path, **changes)))

    assert "read from a virtual GPU, not from a card" in card.source
    assert card.name == "NVIDIA H200"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"schema": ...}, 'its schema is missing, not "memfit.card"'),
        ({"schema": "memfit.probe"}, "its schema is 'memfit.probe'"),
        ({"schema_version": 2}, "its schema_version is 2, and this memfit reads 1"),
        ({"schema_version": True}, "its schema_version is True"),
        ({"name": ...}, "name is missing"),
        ({"total_bytes": ...}, "total_bytes is missing"),
        ({"source": ...}, "source is missing"),
        ({"total_bytes": "80GiB"}, "total_bytes is a text, and a whole number is wanted"),
        ({"total_bytes": 1e11}, "total_bytes is a number with a fraction"),
        ({"sms": True}, "sms is true or false"),
        ({"sms": None}, "sms is null"),
        ({"name": 7}, "name is a number, and a text is wanted"),
        ({"total_bytes": 576716800}, "its total_bytes (550.00 MiB) is not above its context_bytes"),
        ({"context_bytes": -1}, "context_bytes is -1"),
        ({"total_bytes": 0}, "total_bytes is 0, which is not within 64.00 MiB to 1.00 TiB"),
        ({"total_bytes": TIB + 1}, "not within 64.00 MiB to 1.00 TiB"),
        ({"total_bytes": 10**300}, "not within 64.00 MiB to 1.00 TiB"),
        ({"sms": 0}, "sms is 0, which is not within 1 to 1024"),
        ({"sms": -5}, "sms is -5"),
        ({"smem_optin_bytes": 240000}, "is above smem_per_sm_bytes (233472)"),
        ({"smem_per_sm_bytes": 1}, "smem_per_sm_bytes is 1"),
        ({"l2_bytes": 0}, "l2_bytes is 0"),
        ({"compute_capability": "9"}, 'compute_capability is "9"; it is written as "8.9"'),
        ({"compute_capability": "9.0a"}, 'compute_capability is "9.0a"'),
        ({"compute_capability": "\u0669.\u0660"}, "compute_capability is"),
        ({"compute_capability": 9.0}, "compute_capability is a number with a fraction"),
        ({"compute_capability": "6.1"}, "compute_capability is 6.1, and virtual GPUs are 7.0 to"),
        ({"compute_capability": "99.0"}, "compute_capability is 99.0"),
        ({"name": "A;total=1"}, "name holds ';'"),
        ({"name": "A=B"}, "name holds '='"),
        ({"name": 'A"B'}, "name holds '\"'"),
        ({"name": "A\x1b[31m"}, "name holds '\\x1b'"),
        ({"name": "A\nB"}, "name holds '\\n'"),
        ({"name": "A\0B"}, "name holds '\\x00'"),
        ({"name": "Größe"}, "name holds 'ö'"),
        ({"name": " "}, "name is empty"),
        ({"name": " (virtual)"}, "name is empty"),
        ({"name": "N" * 101}, "name has 101 characters, and 100 are allowed"),
        ({"source": "a\x07b"}, "source holds a control character"),
        ({"source": "s" * 501}, "source has 501 characters"),
        ({"read_from": "hearsay"}, "read_from is 'hearsay'"),
        ({"read_from": ["card"]}, "read_from is ['card']"),
    ],
)
def test_a_fault_is_one_clear_error(tmp_path, changes, why):
    error = refusal(write(tmp_path, **changes))

    assert error.message.startswith(f"the card file {tmp_path / 'card.json'}")
    assert why in error.message
    assert error.message.isprintable()


def test_an_unknown_field_is_refused_with_the_nearest(tmp_path):
    error = refusal(write(tmp_path, total_byte=5))

    assert "it has no use for a field 'total_byte'" in error.message
    assert error.hint == "did you mean total_bytes?"


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "it is no JSON"),
        (b"name: X", "it is no JSON"),
        (b"[]", "it holds a list instead of an object"),
        (b'{"name": "\xff"}', "byte 10 is not UTF-8"),
        (b'{"sms": 1, "sms": 2}', "sms is given twice"),
        (b'{"sms": NaN}', "NaN is no JSON"),
        (b"[" * 60000, "it is no JSON"),
        (b'{"sms": ' + b"9" * 5000 + b"}", "it is no JSON"),
        (b" " * 70000, "it is larger than 64.00 KiB"),
    ],
)
def test_what_is_no_card_at_all_is_refused(tmp_path, data, why):
    path = tmp_path / "card.json"
    path.write_bytes(data)

    assert why in refusal(path).message


def test_folders_pipes_and_devices_are_not_read(tmp_path):
    os.mkfifo(tmp_path / "pipe.json")

    assert "it is a folder" in refusal(f"{tmp_path}/").message
    assert "it is no ordinary file" in refusal(tmp_path / "pipe.json").message
    assert "it is no ordinary file" in refusal("/dev/zero").message
    assert "refused" in refusal("a\0b.json").message
    assert "refused" in refusal(f"{'x' * 5000}.json").message


def test_a_file_that_is_not_there_points_to_the_nearest_file_or_card(tmp_path):
    write(tmp_path, "cluster-h200.json")

    assert refusal(tmp_path / "cluster-h20.json").hint == (
        f"did you mean {tmp_path / 'cluster-h200.json'}?"
    )
    missing = refusal(tmp_path / "rtx4090.json")
    assert missing.message == f"there is no card file {tmp_path / 'rtx4090.json'}"
    assert str(missing.hint).startswith("did you mean the card rtx-4090")
    assert refusal(tmp_path / "zzzzzz.json").hint == (
        "`memfit gpus` lists the cards that need no file"
    )


READINGS = st.builds(
    CardReading,
    name=st.text(max_size=120),
    read_from=st.sampled_from(["card", "virtual", "hand"]),
    total_bytes=st.integers(0, 2 * TIB),
    compute_capability=st.sampled_from(["7.0", "8.9", "12.1", "6.1", "x", "8.9;sms=1"]),
    sms=st.integers(-1, 2000),
    smem_per_sm_bytes=st.sampled_from([0, 49152, 102400, 233472, 2**21]),
    smem_optin_bytes=st.sampled_from([0, 49152, 101376, 2**21]),
    l2_bytes=st.sampled_from([0, 2**20, 2**31]),
    context_bytes=st.none() | st.integers(0, GIB),
    source=st.text(max_size=600),
)


@given(reading=READINGS)
def test_any_reading_is_taken_whole_or_refused(reading):
    try:
        card = parse_card("card.json", write_card(reading).encode("utf-8", "surrogatepass"))
    except UsageError:
        return
    context, _ = context_charge(card)
    fields = description(card, total_bytes=card.total_bytes, context=context, devices=1).split(";")
    assert len(fields) == 10
    assert all(field.count("=") == 1 for field in fields)
    assert fields[0] == f"name={reading.name.removesuffix(' (virtual)').strip()}"


@given(data=st.binary(max_size=300))
@settings(suppress_health_check=[HealthCheck.filter_too_much])
def test_any_bytes_are_refused_without_a_crash(data):
    with pytest.raises(UsageError):
        parse_card("card.json", data)


# -- --memory --------------------------------------------------------------------------------


def _virtual(card):
    try:
        chosen = choose("rtx-4090")
    except CannotJudge as error:
        pytest.skip(error.message)
    return replace(chosen, slug=card.slug, card=card)


@pytest.mark.parametrize(("memory", "total"), [("48GiB", 48 * GIB), ("12GiB", 12 * GIB)])
def test_memory_is_more_or_less_than_the_card_has(memory, total):
    device = describe(_virtual(find_card("rtx-4090")), memory_limit=None, memory=memory)

    assert device.total_bytes == total
    assert device.limit_bytes == total - int(total * 0.02)
    assert device.name == (f"NVIDIA GeForce RTX 4090 with {total // GIB}.00 GiB set by --memory")


def test_a_limit_may_lie_between_the_cards_memory_and_the_one_that_was_set():
    choice = _virtual(find_card("rtx-4090"))
    device = describe(choice, memory_limit="40GiB", headroom="0%", memory="48GiB")

    assert device.limit_bytes == 40 * GIB
    with pytest.raises(UsageError, match=r"above the 48\.00 GiB"):
        describe(choice, memory_limit="49GiB", memory="48GiB")


@pytest.mark.parametrize(
    ("memory", "why"),
    [
        ("2TiB", "more than a virtual GPU can have"),
        ("100MiB", "leaves nothing beside the CUDA context"),
        ("much", "is not a size"),
    ],
)
def test_a_memory_that_makes_no_sense_is_refused(memory, why):
    with pytest.raises(UsageError, match=why):
        describe(_virtual(find_card("rtx-4090")), memory_limit=None, memory=memory)


def test_memory_cannot_be_set_on_a_real_device():
    with pytest.raises(UsageError, match="sets the size of a virtual GPU") as caught:
        describe(choose("cpu"), memory_limit=None, memory="48GiB")
    assert "--memory-limit" in str(caught.value.hint)


# -- the catalogue's honesty -----------------------------------------------------------------


def test_every_figure_of_the_catalogue_names_its_source():
    for card in cards():
        sources = card.sources
        for said in (sources.total, sources.total_driver, sources.total_others, sources.sms):
            assert said, card.slug
        assert sources.shared_memory, card.slug
        assert sources.l2, card.slug
        assert (sources.context is None) == (card.context_bytes is None), card.slug


def test_an_estimated_context_has_a_range_and_a_read_one_has_none():
    for card in cards():
        context = context_of(card)
        assert context.read == (card.context_bytes is not None)
        assert context.low_bytes <= context.charged_bytes <= context.high_bytes
        assert context.read == (context.low_bytes == context.high_bytes)
        assert context.source


@pytest.mark.virtual
def test_the_driver_takes_what_a_file_describes(tmp_path, nursery):
    path = write(tmp_path, "h200.json", sms=99, l2_bytes=50 << 20, name="NVIDIA Odd/One (8.5+)")
    code = """
        import json, torch
        p = torch.cuda.get_device_properties(0)
        print(json.dumps([p.name, p.total_memory, p.major, p.minor, p.multi_processor_count,
                          p.L2_cache_size, torch.cuda.mem_get_info()]))
    """
    card = find_card(str(path))
    variables = prepare(card, total_bytes=card.total_bytes)
    total = card.total_bytes

    assert nursery.value(code, env=variables) == [
        "NVIDIA Odd/One (8.5+) (virtual)",
        total,
        9,
        0,
        99,
        50 << 20,
        [total - 550 * 2**20, total],
    ]
