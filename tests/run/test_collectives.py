"""Ranks of one run exchange small known values over the stand-in for NCCL, as over a real one."""

from __future__ import annotations

import json

import pytest

from tests.run.conftest import Desk

pytestmark = pytest.mark.virtual

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")

JOIN = """
    import json, os, sys, torch, torch.distributed as dist
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    size = dist.get_world_size()
    def on_card(*values, dtype=torch.float):
        return torch.tensor(values, device="cuda", dtype=dtype)
    def say(**found):
        os.write(1, json.dumps({"rank": rank, **found}).encode() + b"\\n")
"""


def said(desk: Desk, code: str, *, ranks: int = 2) -> list[dict[str, object]]:
    """Run ranks under torchrun and return what each said, in order."""
    launcher = (*TORCHRUN, str(ranks))
    ended = desk.run(f"{JOIN}{code}", "--devices", str(ranks), launcher=launcher)
    assert ended.code == 0, ended.err
    lines = [json.loads(line) for line in ended.out.splitlines() if line.startswith("{")]
    return sorted(lines, key=lambda line: int(line["rank"]))


def test_objects_reach_every_rank(desk: Desk) -> None:
    first, second = said(
        desk,
        """
    gathered = [None] * size
    dist.all_gather_object(gathered, {"rank": rank, "words": ["word"] * (1 + 30 * rank)})
    news = [f"news from {rank}", 7] if rank == 1 else [None, None]
    dist.broadcast_object_list(news, src=1)
    mine = [None]
    dist.scatter_object_list(mine, ["for 0", "for one"] if rank == 0 else None, src=0)
    kept = [None] * size if rank == 0 else None
    dist.gather_object(("from", rank), kept, dst=0)
    say(sizes=[len(part["words"]) for part in gathered], ranks=[p["rank"] for p in gathered],
        news=news, mine=mine, kept=kept)
    dist.destroy_process_group()
    """,
    )
    for line in (first, second):
        assert (line["sizes"], line["ranks"]) == ([1, 31], [0, 1])
        assert line["news"] == ["news from 1", 7]
    assert (first["mine"], second["mine"]) == (["for 0"], ["for one"])
    assert (first["kept"], second["kept"]) == ([["from", 0], ["from", 1]], None)


COLLECTIVES = """
    from torch.distributed import ReduceOp
    found = {}
    for name, operation in (("sum", ReduceOp.SUM), ("max", ReduceOp.MAX), ("avg", ReduceOp.AVG)):
        x = on_card(rank + 1, 10.0)
        dist.all_reduce(x, operation)
        found[name] = x.tolist()
    x = on_card(rank, dtype=torch.long)
    dist.broadcast(x, 2)
    found["broadcast"] = x.item()
    parts = [on_card(0.0) for _ in range(size)]
    dist.all_gather(parts, on_card(rank + 0.5))
    found["all_gather"] = [part.item() for part in parts]
    whole = torch.zeros(size, device="cuda")
    dist.all_gather_into_tensor(whole, on_card(rank))
    found["into_tensor"] = whole.tolist()
    out = on_card(0)
    dist.reduce_scatter_tensor(out, on_card(*range(rank, rank + size)))
    found["reduce_scatter"] = out.item()
    out = torch.zeros(size, device="cuda", dtype=torch.long)
    dist.all_to_all_single(out, on_card(*(10 * rank + i for i in range(size)), dtype=torch.long))
    found["all_to_all"] = out.tolist()
    outs = [on_card(0, dtype=torch.long) for _ in range(size)]
    dist.all_to_all(outs, [on_card(10 * rank + i, dtype=torch.long) for i in range(size)])
    found["lists"] = [out.item() for out in outs]
    ring = on_card(0)
    sends = dist.P2POp(dist.isend, on_card(rank), (rank + 1) % size)
    takes = dist.P2POp(dist.irecv, ring, (rank - 1) % size)
    for work in dist.batch_isend_irecv([sends, takes]):
        work.wait()
    found["ring"] = ring.item()
    evens = dist.new_group([0, 2])
    if rank != 1:
        x = on_card(rank)
        dist.all_reduce(x, group=evens)
        found["group"] = x.item()
    if rank == 0:
        dist.send(on_card(42), 1)
    if rank == 1:
        x = on_card(0)
        dist.recv(x, 0)
        found["received"] = x.item()
    large = torch.ones(1 << 20, device="cuda")
    dist.all_reduce(large)
    found["large"] = large[0].item()
    dist.barrier()
    say(**found)
    dist.destroy_process_group()
"""


def test_every_collective_carries_small_values(desk: Desk) -> None:
    for rank, found in enumerate(said(desk, COLLECTIVES, ranks=3)):
        assert found["sum"] == [6, 30]
        assert found["max"] == [3, 10]
        assert found["avg"] == [2, 10]
        assert found["broadcast"] == 2
        assert found["all_gather"] == [0.5, 1.5, 2.5]
        assert found["into_tensor"] == [0, 1, 2]
        assert found["reduce_scatter"] == 3 * rank + 3
        assert found["all_to_all"] == [rank, 10 + rank, 20 + rank]
        assert found["lists"] == found["all_to_all"]
        assert found["ring"] == (rank - 1) % 3
        assert found.get("group") == (None if rank == 1 else 2)
        assert found.get("received") == (42 if rank == 1 else None)
        assert found["large"] == 0  # too large to be exchanged: unknown


PAIR = """
    import os, socket, subprocess, sys

    if "RANK" not in os.environ:  # unlike torchrun, this one ends nobody when a rank has ended
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        known = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        ranks = [
            subprocess.Popen(
                [sys.executable, __file__], env=os.environ | known | {"RANK": r, "LOCAL_RANK": r}
            )
            for r in "01"
        ]
        sys.exit([rank.wait() for rank in ranks] != [4, 3])
"""


def test_a_rank_that_ends_is_told_to_those_that_wait_for_it(desk: Desk) -> None:
    code = f"""{PAIR}{JOIN}
    dist.barrier()
    if rank == 1:
        os._exit(3)
    try:
        x = on_card(1.0)
        dist.all_reduce(x)
        print("went on")
    except dist.DistBackendError as error:
        print("remote process exited" in str(error), flush=True)
        os._exit(4)
    """
    ended = desk.run(code, "--devices", "2")
    assert ended.out == "True\n"
    assert ended.code == 0
