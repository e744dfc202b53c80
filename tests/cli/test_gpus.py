"""`memfit gpus`: one card in full, and the card of this machine as a file."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

import pytest

from memfit.errors import CannotJudge
from memfit.virtual import find_card, prepare, unavailable_reason
from tests.cli.terminal import memfit

if TYPE_CHECKING:
    from pathlib import Path

CARD = find_card("l40s")


@pytest.fixture(scope="session")
def on_virtual_gpu() -> dict[str, str]:
    """Variables with which memfit itself runs on a virtual GPU, as if that were the machine's."""
    if unavailable_reason() is not None:
        pytest.skip(str(unavailable_reason()))
    return prepare(CARD, total_bytes=CARD.total_bytes)


def has_gpu() -> bool:
    return shutil.which("nvidia-smi") is not None


def test_one_card_is_shown_with_the_source_of_every_figure(tmp_path: Path) -> None:
    ended = memfit("gpus", "rtx 4090", cwd=tmp_path)

    assert (ended.code, ended.err) == (0, "")
    said = " ".join(ended.out.split())
    assert said.startswith("NVIDIA GeForce RTX 4090: --device rtx-4090, also 4090")
    assert "25,250,627,584" in said
    assert "driver: CUDA 13.0" in said
    assert "older Linux drivers" in said
    assert "460.00 MiB (estimate" in said
    assert "100 to 300 MiB" in said


def test_a_context_that_was_read_is_shown_without_a_range(tmp_path: Path) -> None:
    said = " ".join(memfit("gpus", "rtx-6000-ada", cwd=tmp_path).out.split())

    assert "426.00 MiB" in said
    assert "estimate" not in said


def test_the_json_says_where_each_figure_is_from(tmp_path: Path) -> None:
    for words in ([], ["b200"]):
        for card in memfit("gpus", *words, "--json", cwd=tmp_path).told["cards"]:
            for figure in ("total", "total_driver", "total_others", "sms", "shared_memory", "l2"):
                assert card["sources"][figure]
            assert card["context"]["source"]
            assert card["context"]["read"] == (card["context_bytes"] is not None)


def test_an_unknown_card_is_a_usage_error(tmp_path: Path) -> None:
    ended = memfit("gpus", "rtx-4091", cwd=tmp_path)

    assert (ended.code, ended.out) == (2, "")
    assert "rtx-4090" in ended.hint


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["h200", "--from-this-machine"], "--from-this-machine reads this machine's GPU"),
        (["--out", "x.json"], "--out is for --from-this-machine"),
        (["h200", "--force"], "--force is for --from-this-machine"),
        (["--from-this-machine", "--out", "no/card.json"], "there is no folder no"),
        (["--from-this-machine", "--out", "."], ". is a folder"),
    ],
)
def test_words_that_do_not_go_together_are_refused(
    words: list[str], why: str, tmp_path: Path
) -> None:
    ended = memfit("gpus", *words, cwd=tmp_path)

    assert (ended.code, ended.out) == (2, "")
    assert ended.error.startswith(why)
    assert ended.hint


@pytest.mark.skipif(has_gpu(), reason="this machine has a GPU")
def test_a_machine_without_a_gpu_cannot_say(tmp_path: Path) -> None:
    ended = memfit("gpus", "--from-this-machine", "--out", "card.json", cwd=tmp_path)

    assert (ended.code, ended.out) == (CannotJudge.exit_code, "")
    assert ended.error
    assert ended.hint.startswith("run it on the machine with the GPU")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.virtual
def test_the_card_of_the_machine_becomes_a_file(
    on_virtual_gpu: dict[str, str], tmp_path: Path
) -> None:
    words = ("gpus", "--from-this-machine", "--out", "card.json")
    ended = memfit(*words, cwd=tmp_path, **on_virtual_gpu)

    assert (ended.code, ended.out) == (0, ""), ended.err
    assert "wrote card.json: NVIDIA L40S (virtual)" in ended.err
    assert "this GPU is virtual, and the file says so" in ended.err
    written = json.loads((tmp_path / "card.json").read_text())
    card = find_card(str(tmp_path / "card.json"))
    for figure in (
        "total_bytes",
        "compute_capability",
        "sms",
        "smem_per_sm_bytes",
        "smem_optin_bytes",
        "l2_bytes",
        "context_bytes",
    ):
        assert written[figure] == getattr(CARD, figure) == getattr(card, figure), figure
    assert written["read_from"] == "virtual"
    assert written["source"].startswith("torch ")
    assert "with driver" in written["source"]
    assert "read from a virtual GPU, not from a card" in card.source

    again = memfit(*words, cwd=tmp_path, **on_virtual_gpu)
    assert (again.code, again.error) == (2, "card.json exists")


@pytest.mark.virtual
def test_without_a_file_the_card_is_the_answer(
    on_virtual_gpu: dict[str, str], tmp_path: Path
) -> None:
    ended = memfit("gpus", "--from-this-machine", cwd=tmp_path, **on_virtual_gpu)

    assert ended.code == 0
    assert ended.told["name"] == "NVIDIA L40S (virtual)"


@pytest.mark.virtual
def test_what_no_virtual_gpu_can_imitate_is_said(
    on_virtual_gpu: dict[str, str], tmp_path: Path
) -> None:
    odd = on_virtual_gpu["MEMFIT_VGPU_CARD"].replace("NVIDIA L40S", "NVIDIA <L40S>")
    ended = memfit(
        "gpus", "--from-this-machine", cwd=tmp_path, **{**on_virtual_gpu, "MEMFIT_VGPU_CARD": odd}
    )

    assert (ended.code, ended.out) == (CannotJudge.exit_code, "")
    assert "no virtual GPU can imitate this machine's 'NVIDIA <L40S> (virtual)'" in ended.error


@pytest.mark.virtual
def test_a_probe_takes_a_card_file_and_another_size(tmp_path: Path) -> None:
    if unavailable_reason() is not None:
        pytest.skip(str(unavailable_reason()))
    (tmp_path / "work.py").write_text(
        "import torch\n"
        "def model(): return torch.nn.Linear(8, 8)\n"
        "def batch(m): return torch.randn(m, 8, device='cuda')\n"
        "def loss(model, batch): return model(batch).square().mean()\n"
    )
    card = {
        "schema": "memfit.card",
        "schema_version": 1,
        "name": "NVIDIA Prototype",
        "total_bytes": 8 << 30,
        "compute_capability": "8.9",
        "sms": 40,
        "smem_per_sm_bytes": 102400,
        "smem_optin_bytes": 101376,
        "l2_bytes": 32 << 20,
        "source": "a guess",
    }
    (tmp_path / "Proto.json").write_text(json.dumps(card))
    ended = memfit(
        *("probe", "work.py", "--device", "Proto.json", "--memory", "48GiB", "-B", "4", "--json"),
        cwd=tmp_path,
    )

    assert ended.code == 0, ended.err
    device = ended.told["spec"]["device"]
    assert (
        device["name"]
        == "NVIDIA Prototype as Proto.json describes it with 48.00 GiB set by --memory"
    )
    assert device["total_bytes"] == 48 << 30
    assert (
        "48.00 GiB set by --memory"
        in (tmp_path / "reports" / f"work-{device['slug']}" / "report.html").read_text()
    )
