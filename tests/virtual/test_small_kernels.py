"""Kernels that are really run: small known values stay known, and nothing else is made up."""

from __future__ import annotations

import pytest

from tests.virtual.scripts import PRELUDE

pytestmark = pytest.mark.virtual

SETUP = (
    PRELUDE
    + """
from memfit.virtual import control
d = "cuda"
counter = torch.zeros((), dtype=torch.long, device=d)
lengths = torch.tensor([3, 1, 2], device=d)
rate = torch.tensor(1e-3, device=d)
small = torch.tensor([1, 2], dtype=torch.int32, device=d)
flags = torch.tensor([True, False, True], device=d)
bytes_ = torch.tensor([7, 8, 9], dtype=torch.uint8, device=d)
"""
)

KNOWN = {
    "(counter.add_(1), counter.add_(2), counter.item())[2]": 3,
    "(lengths + 1).tolist()": [4, 2, 3],
    "(lengths + lengths).tolist()": [6, 2, 4],
    "(lengths - 5).tolist()": [-2, -4, -3],
    "(lengths > 1).tolist()": [True, False, True],
    "(lengths <= 2).tolist()": [False, True, True],
    "(lengths[0] > lengths[1]).item()": True,
    "(lengths[1] >= lengths[2]).item()": False,
    "(lengths == 1).tolist()": [False, True, False],
    "(lengths != lengths).tolist()": [False, False, False],
    "bool(0.0 <= rate), bool(rate < 1), bool(rate == 0)": [True, True, False],
    "round((rate + 1).item(), 6)": 1.001,
    "(small - 3).tolist()": [-2, -1],
    "(bytes_ + bytes_).tolist()": [14, 16, 18],
    "(bytes_ - bytes_ - bytes_).tolist()": [249, 248, 247],
    "int(max([lengths[i].unsqueeze(0) for i in range(3)]).item())": 3,
    "torch.cat([lengths]).tolist()": [3, 1, 2],
    "torch.cat([bytes_, bytes_[:2]]).tolist()": [7, 8, 9, 7, 8],
    "torch.stack([lengths[0], lengths[2]]).tolist()": [3, 2],
    "torch.stack([rate, rate]).shape[0], round(torch.stack([rate, rate])[1].item(), 6)": [2, 0.001],
    "lengths.sum().item()": 6,
    "(lengths.max().item(), lengths.min().item())": [3, 1],
    "small.max().item()": 2,
    "round(torch.stack([rate, rate]).sum().item(), 6)": 0.002,
    "(flags.all().item(), flags.any().item())": [False, True],
    "((lengths > 0).all().item(), (lengths > 5).any().item())": [True, False],
    "(lengths.sum(-1) == 6).all().item()": True,
    "lengths[lengths > 1].shape[0]": 2,
    "(flags.nonzero().shape[0], torch.randn(3, 4, device=d)[flags].shape[0])": [2, 2],
}


def test_what_these_kernels_compute_is_what_a_card_would(on_card):
    lines = "\n".join(f"found[{code!r}] = {code}" for code in KNOWN)
    script = f"{SETUP}\nfound = {{}}\n{lines}\n"
    found, unknown = on_card(f"{script}print(json.dumps([found, control.unknown_reads()]))")

    assert found == {**KNOWN}
    assert unknown == 0


UNKNOWN = """
large = torch.randn(1024, 1024, device=d)
loss = large.sum()
seen = [
    (loss + 1).item(), (loss > 3).item(), torch.stack([loss, loss]).tolist(),
    torch.stack([loss, rate]).sum().item(), (lengths * 2 + 1).tolist(), (loss == loss).item(),
]
"""


def test_what_depends_on_other_kernels_stays_unknown(on_card):
    seen, unknown = on_card(f"{SETUP}{UNKNOWN}print(json.dumps([seen, control.unknown_reads()]))")

    assert seen == [0, False, [0, 0], 0, [0, 0, 0], False]
    assert unknown == len(seen)


def test_a_result_is_no_more_certain_than_what_it_came_from(on_card):
    script = f"""{SETUP}
kinds = []
control.listen(lambda size, kind: kinds.append(kind))
(counter + 1).item()
torch.randn(8, device=d).sin()  # might have written to the counter
(counter + 1).item()
print(json.dumps(kinds))
"""
    assert on_card(script) == [0, 1]


def test_a_number_that_a_kernel_computes_does_not_read_as_one_that_lay_there_before(on_card):
    script = f"""{SETUP}
large = torch.randn(1024, 1024, device=d)
seen = []
for value in (7, 8.0, True):
    for compute in (torch.sum, torch.argmax, torch.mean, torch.linalg.norm, lambda x: x[0] @ x[1]):
        old = torch.tensor(value, device=d)
        compute(large)  # its temporary memory is at hand from now on
        place = old.data_ptr()
        del old
        new = compute(large)
        seen.append(new.item() if new.data_ptr() == place else 0)
print(json.dumps(seen))
"""
    assert on_card(script) == [0] * 15


def test_the_count_of_an_unknown_mask_is_no_number_that_lay_there_before(on_card):
    script = f"""{SETUP}
large = torch.randn(1024, device=d)
seen = []
for _ in range(20):
    held = [torch.tensor(float(i + 1), device=d) for i in range(8)]
    del held
    seen.append(large[large > 0].shape[0])
print(json.dumps(seen))
"""
    assert on_card(script) == [0] * 20


def test_the_scale_of_a_gradient_scaler_grows_in_the_driver(on_card):
    script = f"""{SETUP}
weight = torch.randn(1024, 1024, device=d, requires_grad=True)
optimizer = torch.optim.SGD([weight], lr=0.1)
scaler = torch.amp.GradScaler("cuda", init_scale=8.0, growth_interval=2)
seen = []
for _ in range(4):
    scaler.scale(weight.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    seen.append(scaler.get_scale())
print(json.dumps(seen))
"""
    assert on_card(script) == [8, 16, 16, 32]
