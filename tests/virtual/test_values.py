"""Values beside a program: a first pass works out what is read, the measured one is answered."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from memfit import virtual
from memfit.errors import UsageError
from memfit.probe import share_of
from memfit.records import DeviceKind, DeviceSpec, Precision, Split, TrialSpec, Verdict
from memfit.trial.runner import TrialRunner
from memfit.units import GIB, MIB
from tests.virtual.scripts import PRELUDE, TRANSFORMER

pytestmark = pytest.mark.virtual

WORKLOAD = Path(__file__).parents[1] / "workloads" / "values.py"
CARD = virtual.find_card("rtx-3090")

VALUES = (
    PRELUDE
    + """
from memfit.virtual import control
from memfit.virtual.values import ValueMode
noted = []
def values(share=1.0):
    return ValueMode(share=share, note=noted.append)
"""
)
LARGE = "torch.randn(1024, 1024, device='cuda')"
"""Too large to be worked out."""


@pytest.fixture
def with_values(on_card):
    """Evaluate an expression with values beside it; return its value and what was assumed."""

    def evaluate(expression, *, setup="", share=1.0):
        script = f"{VALUES}{setup}\nwith values({share}):\n    value = {expression}\n"
        return on_card(script + "print(json.dumps([value, noted]))")

    return evaluate


# -- what is known --------------------------------------------------------------------------

KNOWN = {
    "torch.arange(5, device=d).sum().item()": 10,
    "torch.tensor(3.5, device=d).item()": 3.5,
    "torch.arange(10, device=d)[3].item()": 3,
    "torch.arange(6, device=d).view(2, 3).t().tolist()": [[0, 3], [1, 4], [2, 5]],
    "torch.arange(6., device=d).to('cpu', torch.int32).tolist()": [0, 1, 2, 3, 4, 5],
    "torch.empty(3, 4)[:, ::2].copy_(torch.arange(6, device=d).view(3, 2)).tolist()": [
        [0, 1],
        [2, 3],
        [4, 5],
    ],
    "(torch.tensor([1, 2]).to(d) + 1).tolist()": [2, 3],
    "torch.tensor([0, 1, 0, 1], device=d).nonzero().flatten().tolist()": [1, 3],
    "torch.arange(9, device=d)[torch.arange(9, device=d) % 3 == 0].tolist()": [0, 3, 6],
    "torch.masked_select(torch.arange(4, device=d), torch.arange(4, device=d) > 1).tolist()": [
        2,
        3,
    ],
    "torch.unique(torch.tensor([3, 1, 3], device=d)).tolist()": [1, 3],
    "torch.unique(torch.tensor([[3, 1], [3, 1]], device=d), dim=0).tolist()": [[3, 1]],
    "torch.unique_consecutive(torch.tensor([3, 3, 1], device=d)).tolist()": [3, 1],
    "torch.repeat_interleave(torch.tensor([2, 0, 1], device=d)).tolist()": [0, 0, 2],
    "torch.bincount(torch.tensor([1, 1, 3], device=d)).tolist()": [0, 2, 0, 1],
    "F.one_hot(torch.tensor([1, 2], device=d)).tolist()": [[0, 1, 0], [0, 0, 1]],
    "torch.equal(torch.ones(3, device=d), torch.zeros(3, device=d))": False,
    "bool((torch.arange(3, device=d) > 1).any())": True,
    "torch.arange(3, device=d).add_(1).mul_(2).tolist()": [2, 4, 6],
    "torch.tensor([1 + 2j], device=d).conj().imag.tolist()": [-2],
    "[t.item() for t in torch._foreach_add([torch.ones((), device=d)] * 2, 1)]": [2, 2],
    "torch.arange(100_000, device=d).cpu().sum().item()": 4_999_950_000,
}


def test_what_host_code_reads_is_what_a_card_would_have_computed(on_card):
    lines = "\n".join(f"    found[{code!r}] = {code}" for code in KNOWN)
    found, noted = on_card(
        f"{VALUES}\nd = 'cuda'\nfound = {{}}\nwith values():\n{lines}\n"
        "print(json.dumps([found, noted]))"
    )

    assert found == KNOWN
    assert noted == []


def test_a_loop_over_a_counter_on_the_device_ends(with_values):
    setup = """
def count():
    counter = torch.zeros((), dtype=torch.long, device="cuda")
    while counter < 7:
        counter += 1
    return counter.item()
"""
    assert with_values("count()", setup=setup) == [7, []]


def test_generation_ends_at_its_length_whatever_the_tokens_are(with_values):
    setup = """
torch.manual_seed(0)
embed, head = nn.Embedding(50_000, 64).cuda(), nn.Linear(64, 50_000).cuda()

@torch.no_grad()
def generate(longest=20, eos=2):
    tokens = torch.ones(4, 1, dtype=torch.long, device="cuda")
    unfinished = torch.ones(4, dtype=torch.long, device="cuda")
    lengths = torch.ones(4, dtype=torch.long, device="cuda")
    while unfinished.max() > 0 and lengths.max() < longest:
        new = head(embed(tokens)[:, -1]).argmax(-1)
        unfinished = unfinished.mul(new.ne(eos).long())
        lengths = lengths + 1
        tokens = torch.cat([tokens, new[:, None]], 1)
    return tokens.shape[1]
"""
    value, noted = with_values("generate()", setup=setup)

    assert value == 20
    assert set(noted) == {"value"}


def test_the_scale_of_a_gradient_scaler_grows_as_it_would(with_values):
    setup = """
def scales():
    weight = torch.randn(1024, 1024, device="cuda", requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler = torch.amp.GradScaler("cuda", init_scale=8.0, growth_interval=2)
    seen = []
    for _ in range(4):
        scaler.scale(weight.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        seen.append(scaler.get_scale())
    return seen
"""
    assert with_values("scales()", setup=setup) == [[8, 16, 16, 32], []]


@pytest.mark.parametrize("kind", ["capturable", "fused"])
def test_step_counters_on_the_device_count(with_values, kind):
    setup = f"""
def steps():
    weight = torch.randn(1024, 1024, device="cuda", requires_grad=True)
    optimizer = torch.optim.AdamW([weight], {kind}=True)
    for _ in range(3):
        weight.sum().backward()
        optimizer.step()
    return [s["step"].is_cuda and s["step"].item() for s in optimizer.state.values()]
"""
    assert with_values("steps()", setup=setup) == [[3], []]


def test_lbfgs_minimises_a_small_problem(with_values):
    setup = """
def minimise():
    weight = torch.tensor([3.0, -2.0], device="cuda", requires_grad=True)
    optimizer = torch.optim.LBFGS([weight], max_iter=20, line_search_fn="strong_wolfe")
    calls = []
    def closure():
        optimizer.zero_grad()
        loss = (weight - 1).square().sum()
        loss.backward()
        calls.append(loss.item())
        return loss
    optimizer.step(closure)
    return [calls[0], round(calls[-1], 6)]
"""
    assert with_values("minimise()", setup=setup) == [[13, 0], []]


def test_random_numbers_of_the_host_are_left_to_the_program(with_values):
    value, _ = with_values(
        "(torch.randn(4, device='cuda'), torch.rand(1).item())[1]", setup="torch.manual_seed(7)"
    )
    plain, _ = with_values("torch.rand(1).item()", setup="torch.manual_seed(7)")

    assert value == plain


# -- what is assumed ------------------------------------------------------------------------


@pytest.mark.parametrize(("share", "rows"), [(1.0, 1024 * 1024), (0.25, 256 * 1024), (0.0, 0)])
def test_the_share_of_an_unknown_mask_that_counts_is_chosen(with_values, share, rows):
    counted = "[x[x > 0].shape[0], (x > 0).nonzero().shape[0], x.masked_select(x > 0).numel()]"
    value, noted = with_values(counted, setup=f"x = {LARGE}", share=share)

    assert value == [rows] * 3
    assert noted == ["shape"] * 3


def test_every_matrix_of_a_batch_gets_the_exponential_that_costs_most(with_values):
    value, noted = with_values(
        "[torch.linalg.matrix_exp(x).shape[0], torch.linalg.matrix_exp(x[0]).shape[0]]",
        setup="x = torch.randn(3, 8, 8, device='cuda')",
    )

    assert value == [3, 8]
    assert noted == ["shape"]


def test_flags_that_were_set_one_by_one_are_no_more_than_those(with_values):
    """As detection models choose which boxes to train on."""
    setup = f"""
x = {LARGE}.flatten()[:5000]
def chosen(*numbers):
    flags = []
    for number in numbers:
        those = torch.where(x > 0)[0]
        flags.append(torch.zeros_like(x > 0, dtype=torch.uint8))
        flags[-1][those[torch.randperm(those.numel(), device="cuda")[:number]]] = 1
    return flags
def count(flags):
    return torch.where(flags)[0].numel()
def counts():
    one, other = chosen(128, 384)
    found = [count(one), count(one | other), count(torch.cat([one, other])), count(one & other)]
    found.append(count(one.bool()[:100]))
    one.fill_(1).mul_(x > 0)
    return found + [count(one)]
"""
    value, noted = with_values("counts()", setup=setup)

    assert value == [128, 512, 512, 128, 100, 5000]
    assert set(noted) == {"shape"}


ASSUMED = {
    "x.sum().item()": 1.0,
    "x.argmax().item()": 0,
    "bool((x > 0).any())": False,
    "bool((x > 0).all())": True,
    "bool(torch.isfinite(x).all())": True,
    "bool(torch.isnan(x).any())": False,
    "bool((x.argmax(-1) == 5).all())": False,
    "(x > 0).sum().item()": 1024 * 1024,
    "float(x.sum() + 1)": 2.0,
}


def test_an_unknown_value_is_assumed_and_noted(with_values):
    value, noted = with_values(f"[{', '.join(ASSUMED)}]", setup=f"x = {LARGE}")

    assert dict(zip(ASSUMED, value, strict=True)) == ASSUMED
    assert noted == ["value"] * len(ASSUMED)


# -- trials ---------------------------------------------------------------------------------


def spec(microbatch=64, **changes):
    fields = {
        "index": 1,
        "purpose": "search",
        "split": Split(microbatch=microbatch, accumulation_steps=2),
        "group_microbatches": 2,
        "device": DeviceSpec(
            kind=DeviceKind.VIRTUAL,
            slug=CARD.slug,
            name=CARD.name,
            total_bytes=CARD.total_bytes,
            limit_bytes=8 * GIB,
            context_bytes=virtual.context_charge(CARD)[0],
        ),
        "timeout_s": 120.0,
    }
    return TrialSpec(**{**fields, **changes})


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    kinds = tmp_path_factory.mktemp("reads") / "kind"
    environment = virtual.prepare(CARD, total_bytes=CARD.total_bytes) | {"READS": str(kinds)}
    with TrialRunner(str(WORKLOAD), {}, environment=environment, load_timeout_s=300) as runner:
        runner.open()

        def trial(kind, **changes):
            kinds.write_text(kind)
            runner._reads_values = False  # as if it were the first trial of its workload
            return runner.run(spec(**changes))

        yield trial


def memory_of(result):
    memory = dataclasses.asdict(result.devices[0])
    for phase in memory["phases"]:
        del phase["seconds"]
    return memory


def test_a_value_dependent_branch_is_taken_counted_and_placed(run):
    result, plain = run("branch"), run("nothing")

    assert result.verdict is Verdict.FITS
    assert result.peak_allocated_bytes - plain.peak_allocated_bytes > 200 * MIB
    assert len(result.limits) == 1
    assert "read 4 times a value that only kernels know" in result.limits[0]
    line = 1 + WORKLOAD.read_text().splitlines().index("        if out.sum() > 0:")
    assert f"workloads/values.py:{line}" in result.limits[0]
    assert plain.limits == ()


def test_a_trial_that_reads_nothing_is_measured_once(run):
    assert run("nothing").wall_s < run("logged").wall_s
    assert run("nothing").limits == ()


def test_reading_the_loss_changes_no_byte_and_is_said(run):
    plain, logged = run("nothing"), run("logged")

    assert memory_of(plain) == memory_of(logged)
    assert "4 times" in logged.limits[0]


def test_a_counter_on_the_device_is_known_and_nothing_is_said(run):
    counted = run("counter")

    assert counted.limits == ()
    assert counted.peak_allocated_bytes > run("nothing").peak_allocated_bytes


def test_labels_that_are_masked_out_are_counted_exactly(run):
    assert run("labels").verdict is Verdict.FITS
    assert run("labels").limits == ()


def test_a_mask_of_unknown_values_keeps_what_the_user_says(run):
    worst, half, none = (run("mask", data_dependent=share) for share in (1.0, 0.5, 0.0))

    peaks = [result.peak_allocated_bytes for result in (worst, half, none)]
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[0] > peaks[2]
    assert "all of the elements concerned were taken to count" in worst.limits[0]
    assert "50% of the elements" in half.limits[0]
    assert "none of the elements" in none.limits[0]


def test_every_expert_of_a_mixture_gets_every_token_and_that_is_said(run):
    worst, none = run("experts"), run("experts", data_dependent=0.0)

    assert worst.verdict is none.verdict is Verdict.FITS
    assert worst.peak_allocated_bytes > none.peak_allocated_bytes
    assert "Sizes depended 16 times on values that only kernels know" in worst.limits[0]
    assert "workloads/values.py:" in worst.limits[0]


def test_memfits_own_scaler_needs_no_second_pass(run):
    result = run("nothing", precision=Precision.FP16, clip_norm=1.0)

    assert result.verdict is Verdict.FITS
    assert result.optimizer_steps_applied == result.optimizer_steps_attempted
    assert result.limits == ()


def test_replicas_need_no_second_pass(run):
    split = Split(microbatch=4, accumulation_steps=2, replicas=4)

    assert run("nothing", split=split).limits == ()
    assert run("logged", split=split).verdict is Verdict.FITS


def test_the_same_trial_gives_the_same_bytes_every_time(run):
    results = [memory_of(run("experts")) for _ in range(3)]

    assert results[0] == results[1] == results[2]


def test_a_loop_that_waits_for_an_unknown_value_is_named(run):
    result = run("endless", microbatch=1)

    assert result.verdict is Verdict.ERROR
    assert "workloads/values.py:" in result.evidence.text
    assert "a virtual GPU cannot know" in result.evidence.text


# -- the tape --------------------------------------------------------------------------------


def test_a_read_that_the_tape_does_not_hold_is_counted_and_reads_as_zero(on_card):
    seen = on_card(
        f"{VALUES}x = {LARGE}\ncontrol.play_reads(b'')\n"
        "print(json.dumps([x.sum().item(), control.mismatched_reads()]))"
    )

    assert seen == [0, 1]


def test_a_tape_goes_on_where_a_group_began(on_card):
    seen = on_card(
        f"""{VALUES}
def count(n):
    counter = torch.zeros((), device="cuda")
    for _ in range(n):
        counter += 1
    return counter.item()
control.record_reads()
with values():
    count(1)
    group = control.tape_position()
    count(2), count(3)
tape = control.tape()
control.play_reads(tape)
first = [count(0), count(0), count(0)]
control.seek_tape(group)
print(json.dumps([first, count(0), control.mismatched_reads()]))
"""
    )

    assert seen == [[1, 2, 3], 2, 0]


@pytest.mark.parametrize(("words", "share"), [("worst", 1), ("none", 0), ("0.3", 0.3)])
def test_what_counts_is_said_in_words_or_as_a_share(words, share):
    assert share_of(words) == share


@pytest.mark.parametrize("words", ["best", "1.5", "-1", "nan", ""])
def test_a_share_that_is_none_is_refused(words):
    with pytest.raises(UsageError, match="it is worst, none, or a share between 0 and 1"):
        share_of(words)


# -- nothing that is measured changes -------------------------------------------------------

HISTORY = """
def history(steps):
    torch.cuda.memory._record_memory_history(max_entries=100_000, stacks="python", context=None)
    for _ in range(steps):
        step(2, 128)
    traces = torch.cuda.memory._snapshot()["device_traces"][0]
    # What is freed together is freed in another order in any two programs, so each allocation is
    # told with what was in use after it.
    events, used = [], 0
    for trace in traces:
        action, size = trace["action"], trace["size"]
        used += size if action == "alloc" else -size if action == "free_completed" else 0
        if "free" not in action:
            events.append([action, size, used])
    return events
"""


def test_the_allocations_of_a_transformer_are_the_same_with_and_without(on_card, tmp_path):
    script = TRANSFORMER.replace("    loss.backward()\n", "    loss.backward(); read(loss)\n")
    assert script != TRANSFORMER
    head = "from memfit.virtual import control\nread = lambda loss: loss.item()\n"
    plain_script = head + TRANSFORMER + HISTORY
    tape = tmp_path / "tape"
    finish = "events = history(3)\nprint(json.dumps([events, peaks(), control.mismatched_reads()]))"

    # A program that reads nothing, and one that reads its loss, each without and with a tape.
    unread = on_card(plain_script + finish)
    watched = on_card(
        plain_script + "control.listen(lambda *_: None)\ncontrol.play_reads(b'')\n" + finish
    )
    recorded = on_card(
        f"{VALUES}{head}control.record_reads()\nwith values():\n"
        + "".join(f"    {line}\n" for line in (script + HISTORY + "history(3)").splitlines())
        + f"open({str(tape)!r}, 'wb').write(control.tape())\nprint(json.dumps(len(noted)))"
    )
    played = on_card(
        f"{head}{script}{HISTORY}control.play_reads(open({str(tape)!r}, 'rb').read())\n{finish}"
    )

    assert len(unread[0]) > 500
    assert recorded == 3
    assert unread == watched == played
