"""Operators that are not layers: what losses, metrics and data preparation are made of."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from tests.compatibility.catalogue import item
from tests.compatibility.training import CARD, integers, random, train

OPERATORS = "Operators"


def _each(calls: dict[str, Callable[[], object]]) -> str:
    """Call every one, and say which did not get through."""
    failed = {}
    for name, call in calls.items():
        try:
            call()
        except Exception as error:  # noqa: BLE001 - the table shows it
            failed[name] = " ".join(str(error).split())[:120]
    if failed:
        words = "; ".join(f"{name}: {why}" for name, why in failed.items())
        raise RuntimeError(f"{len(failed)} of {len(calls)}: {words}")
    return ", ".join(calls)


@item(OPERATORS, "embedding, dense and sparse")
def embedding() -> None:
    """nn.Embedding with padding and max_norm, EmbeddingBag, sparse gradients with SparseAdam."""
    tokens = integers(1000, 16, 32)
    for table in (
        nn.Embedding(1000, 64, padding_idx=0, device=CARD),
        nn.Embedding(1000, 64, scale_grad_by_freq=True, device=CARD),
        nn.EmbeddingBag(1000, 64, mode="mean", device=CARD),
    ):
        train(table, lambda table=table: table(tokens).square().mean())  # type: ignore[misc]
    capped = nn.Embedding(1000, 64, max_norm=1.0, device=CARD)
    capped(tokens).sum().backward()
    sparse = nn.Embedding(1000, 64, sparse=True, device=CARD)
    optimizer = torch.optim.SparseAdam(sparse.parameters())
    train(sparse, lambda: sparse(tokens).square().mean(), optimizer=optimizer)
    bag = nn.EmbeddingBag(1000, 64, mode="sum", sparse=True, device=CARD)
    train(bag, lambda: bag(tokens).square().mean(), optimizer=torch.optim.SGD(bag.parameters(), 0.1,
          momentum=0.9))  # fmt: skip


@item(OPERATORS, "CTC loss")
def ctc() -> None:
    """The CTC loss of cuDNN and of PyTorch, lengths on the host and on the card, backward."""
    scores = random(50, 4, 20, requires_grad=True)
    share = scores.log_softmax(2)
    targets = torch.randint(1, 20, (4, 10))
    into, out = torch.full((4,), 50), torch.full((4,), 10)
    F.ctc_loss(share, targets.to(CARD), into, out).backward(retain_graph=True)
    flat = targets.int().flatten().to(CARD)
    F.ctc_loss(share, flat, into.int().to(CARD), out.int().to(CARD)).backward(retain_graph=True)
    F.ctc_loss(share, targets.to(CARD), into.to(CARD), out.to(CARD)).backward()


@item(OPERATORS, "losses")
def losses() -> str:
    """Every common loss of torch.nn.functional, forward and backward."""
    x = random(16, 10, requires_grad=True)
    y, labels = random(16, 10), integers(10, 16)
    hot = F.one_hot(labels, 10).float()
    return _each({
        "cross_entropy": lambda: F.cross_entropy(x, labels, label_smoothing=0.1).backward(),
        "nll": lambda: F.nll_loss(x.log_softmax(1), labels).backward(),
        "bce": lambda: F.binary_cross_entropy_with_logits(x, hot).backward(),
        "kl": lambda: F.kl_div(x.log_softmax(1), y.softmax(1), reduction="batchmean").backward(),
        "huber": lambda: F.huber_loss(x, y).backward(),
        "smooth_l1": lambda: F.smooth_l1_loss(x, y).backward(),
        "cosine": lambda: F.cosine_embedding_loss(x, y, torch.ones(16, device=CARD)).backward(),
        "triplet": lambda: F.triplet_margin_loss(x, y, y + 1).backward(),
        "margin": lambda: F.multi_margin_loss(x, labels).backward(),
        "gaussian": lambda: F.gaussian_nll_loss(x, y, y.exp()).backward(),
        "poisson": lambda: F.poisson_nll_loss(x, y).backward(),
    })  # fmt: skip


@item(OPERATORS, "boolean masks, nonzero, unique")
def masks() -> str:
    """Sizes that depend on values; the driver's own answer, without a first pass for values."""
    x = random(64, 32, requires_grad=True)
    small = torch.tensor([True, False, True, False], device=CARD)
    return _each({
        "mask": lambda: x[x > 0].sum().backward(),
        "assignment": lambda: x.detach().clone().__setitem__(x > 0, 1.0),
        "masked_select": lambda: torch.masked_select(x, x > 0).sum().backward(),
        "masked_fill": lambda: x.masked_fill(x > 0, 0).sum().backward(),
        "masked_scatter": lambda: x.detach().masked_scatter(x > 0, x.detach()),
        "nonzero": small.nonzero,
        "where": lambda: torch.where(x > 0),
        "argwhere": lambda: torch.argwhere(x > 0),
        "unique": lambda: integers(10, 100).unique(return_inverse=True, return_counts=True),
        "unique_dim": lambda: integers(10, 100, 2).unique(dim=0),
        "unique_consecutive": lambda: integers(10, 100).unique_consecutive(),
        "bincount": lambda: integers(10, 100).bincount(minlength=10),
        "histc": lambda: x.detach().histc(10),
        "isin": lambda: torch.isin(integers(10, 100), integers(10, 5)),
        "any, all, item": lambda: ((x > 0).any().item(), (x > 0).all().item(), x.sum().item()),
        "equal, allclose": lambda: (torch.equal(x, x), torch.allclose(x, x)),
    })  # fmt: skip


@item(OPERATORS, "repeat_interleave")
def repeats() -> None:
    """A number, a tensor with output_size, and a tensor of counts on the card."""
    x = random(4, 8, requires_grad=True)
    counts = torch.tensor([1, 2, 3, 4], device=CARD)
    x.repeat_interleave(3, 0).sum().backward()
    assert x.repeat_interleave(counts, 0, output_size=10).shape == (10, 8)
    assert x.repeat_interleave(counts, 0).shape[1] == 8


@item(OPERATORS, "sort, topk, routing")
def sorting() -> str:
    """Sorts small and large, topk, median, quantile, searchsorted, cumulative operations."""
    x = random(16, 5000, requires_grad=True)
    return _each({
        "sort": lambda: x.sort(1)[0].sum().backward(),
        "stable sort": lambda: x.detach().flatten().sort(stable=True),
        "argsort": lambda: x.argsort(0),
        "topk": lambda: x.topk(10, 1)[0].sum().backward(),
        "kthvalue": lambda: x.kthvalue(3)[0].sum().backward(),
        "median": lambda: x.median(1)[0].sum().backward(),
        "mode": lambda: integers(5, 8, 100).mode(),
        "quantile": lambda: x.quantile(0.5, dim=1).sum().backward(),
        "searchsorted": lambda: torch.searchsorted(x.detach(), x.detach()),
        "bucketize": lambda: torch.bucketize(x.detach(), x.detach()[0]),
        "cumsum": lambda: x.cumsum(1).sum().backward(),
        "cumprod": lambda: x[:, :50].cumprod(1).sum().backward(),
        "cummax": lambda: x.cummax(1)[0].sum().backward(),
        "logcumsumexp": lambda: x.logcumsumexp(1).sum().backward(),
        "randperm": lambda: torch.randperm(10000, device=CARD),
        "multinomial": lambda: x.detach().abs().multinomial(4),
    })  # fmt: skip


@item(OPERATORS, "FFT and STFT")
def fft() -> str:
    """Real and complex transforms in 1 to 3 dimensions, odd sizes, stft and istft, backward."""
    x = random(4, 1000, requires_grad=True)
    y = random(2, 30, 31, 32, requires_grad=True)
    window = torch.hann_window(256, device=CARD)

    def spectrum() -> torch.Tensor:
        return torch.stft(x, 256, 64, window=window, return_complex=True)

    return _each({
        "fft": lambda: torch.fft.fft(x).abs().sum().backward(),
        "rfft": lambda: torch.fft.irfft(torch.fft.rfft(x)).sum().backward(),
        "fft2": lambda: torch.fft.fft2(y).abs().sum().backward(),
        "rfftn": lambda: torch.fft.irfftn(torch.fft.rfftn(y)).sum().backward(),
        "half": lambda: torch.fft.rfft(x.detach()[:, :512].half()),
        "prime": lambda: torch.fft.fft(random(3, 997)),
        "stft": lambda: spectrum().abs().sum().backward(),
        # istft asks whether the window overlaps itself enough, which no kernel has worked out.
        "istft": lambda: torch.fft.irfft(spectrum(), dim=1).sum().backward(),
    })  # fmt: skip


@item(OPERATORS, "linear algebra")
def linalg() -> str:
    """Factorisations and solvers of torch.linalg, single and batched, backward."""
    a = random(4, 32, 32, requires_grad=True)
    one = random(64, 64, requires_grad=True)
    b = random(4, 32, 8)
    sym = a @ a.mT + 32 * torch.eye(32, device=CARD)
    la = torch.linalg
    return _each({
        "inv": lambda: la.inv(a).sum().backward(retain_graph=True),
        "solve": lambda: la.solve(a, b).sum().backward(),
        "qr": lambda: la.qr(a)[1].sum().backward(),
        "svd": lambda: la.svdvals(a).sum().backward(),
        "svd full": lambda: la.svd(one, full_matrices=False)[1].sum().backward(),
        "eigh": lambda: la.eigvalsh(sym).sum().backward(retain_graph=True),
        "eig": lambda: la.eigvals(one.detach()),
        "cholesky": lambda: la.cholesky(sym).sum().backward(retain_graph=True),
        "cholesky_solve": lambda: torch.cholesky_solve(b, la.cholesky(sym.detach())),
        "lu": lambda: la.lu(a)[1].sum().backward(),
        "lu_factor": lambda: la.lu_factor(one),
        "triangular": lambda: la.solve_triangular(a.tril(), b, upper=False).sum().backward(),
        "lstsq": lambda: la.lstsq(a.detach(), b),
        "det": lambda: la.det(a).sum().backward(),
        "slogdet": lambda: la.slogdet(a)[1].sum().backward(),
        "pinv": lambda: la.pinv(a.detach()),
        "matrix_exp": lambda: la.matrix_exp(a.detach()[0]),
        "matrix_rank": lambda: la.matrix_rank(a.detach()),
        "norm": lambda: la.matrix_norm(a, 2).sum().backward(),
        "householder": lambda: la.householder_product(a.detach(), random(4, 32)),
        "ldl": lambda: la.ldl_factor(sym.detach()),
    })  # fmt: skip


@item(
    OPERATORS,
    "matrix_exp of a batch",
    why="nonzero() over the matrices' norms picks each one's degree, and finds none",
)
def matrix_exp() -> None:
    """torch.linalg.matrix_exp, which sorts the matrices by their norms on the host."""
    torch.linalg.matrix_exp(random(4, 32, 32))


@item(OPERATORS, "segment_reduce with its check")
def segments() -> None:
    """torch.segment_reduce, which adds up the lengths on the card and looks at the sum."""
    torch.segment_reduce(random(32, 16), "sum", lengths=torch.tensor([10, 22], device=CARD))


@item(OPERATORS, "scatter, gather, index")
def scatter() -> str:
    """Scatter in all reductions, gather, index_add, index_put, take_along_dim, segments."""
    x = random(32, 16, requires_grad=True)
    into = torch.zeros(32, 16, device=CARD)
    at, rows = integers(32, 32, 16), integers(32, 20)
    return _each({
        "gather": lambda: x.gather(0, at).sum().backward(),
        "scatter_add": lambda: into.scatter_add(0, at, x).sum().backward(),
        "scatter": lambda: into.scatter(0, at, x).sum().backward(),
        "scatter_reduce": lambda: into.scatter_reduce(0, at, x, "amax").sum().backward(),
        "scatter mean": lambda: into.scatter_reduce(0, at, x, "mean").sum().backward(),
        "index_select": lambda: x.index_select(0, rows).sum().backward(),
        "index": lambda: x[rows].sum().backward(),
        "index_add": lambda: into.index_add(0, rows, x[:20]).sum().backward(),
        "index_put": lambda: into.index_put((rows,), x[:20], accumulate=True).sum().backward(),
        "index_reduce": lambda: into.index_reduce(0, rows, x.detach()[:20], "prod"),
        "take_along_dim": lambda: x.take_along_dim(at, 0).sum().backward(),
        "segment_reduce": lambda: torch.segment_reduce(
            x.detach(), "sum", lengths=torch.tensor([10, 22], device=CARD), unsafe=True
        ),
    })  # fmt: skip


@item(OPERATORS, "sparse matrices")
def sparse() -> str:
    """COO and CSR products, conversions, 2:4 pruning left out."""
    indices = torch.stack([torch.arange(64), torch.arange(64)]).to(CARD)
    coo = torch.sparse_coo_tensor(indices, random(64), (64, 64), is_coalesced=True)
    starts = torch.arange(65, device=CARD, dtype=torch.int32)
    csr = torch.sparse_csr_tensor(starts, indices[1].int(), random(64), (64, 64))
    x = random(64, 16, requires_grad=True)
    return _each({
        "coo @ dense": lambda: torch.sparse.mm(coo, x).sum().backward(),
        "csr @ dense": lambda: (csr @ x).sum().backward(),
        "coalesce": lambda: torch.sparse_coo_tensor(indices, random(64), (64, 64)).coalesce(),
        "to_sparse": x.detach().to_sparse,
        "to_dense": coo.to_dense,
        "csr to coo": csr.to_sparse_coo,
        "addmm": lambda: torch.sparse.addmm(random(64, 16), coo, x).sum().backward(),
        "csr @ csr": lambda: csr @ csr,
        "sampled_addmm": lambda: torch.sparse.sampled_addmm(csr, random(64, 8), random(8, 64)),
    })  # fmt: skip


@item(OPERATORS, "special functions (compiled when first used)")
def special() -> str:
    """What PyTorch compiles with NVRTC when it is first called, and complex arithmetic."""
    x = random(100).abs() + 1
    whole = integers(100, 100)
    z = torch.complex(x, x)
    sp = torch.special
    return _each({
        "bessel_j0": lambda: sp.bessel_j0(x),
        "zeta": lambda: sp.zeta(x, x),
        "airy_ai": lambda: sp.airy_ai(x),
        "entr": lambda: sp.entr(x),
        "i0": lambda: torch.i0(x),
        "i1e": lambda: sp.i1e(x),
        "digamma": lambda: torch.digamma(x),
        "polygamma": lambda: torch.polygamma(2, x),
        "lgamma": lambda: torch.lgamma(x),
        "gcd": lambda: torch.gcd(whole, whole),
        "lcm": lambda: torch.lcm(whole, whole),
        "sinc": lambda: torch.sinc(x),
        "log_ndtr": lambda: sp.log_ndtr(x),
        "complex prod": z.prod,
        "complex sum": z.sum,
        "complex tanh": z.tanh,
        "complex pow": lambda: z.pow(2.5),
        "complex mm": lambda: z.view(10, 10) @ z.view(10, 10),
    })  # fmt: skip


@item(OPERATORS, "pooling, resizing, sampling, padding")
def sampling() -> str:
    """Pools of all kinds, interpolation modes, grid_sample, fold, pixel_shuffle, pads."""
    x = random(2, 8, 32, 32, requires_grad=True)
    grid = random(2, 16, 16, 2)
    return _each({
        "max_pool": lambda: F.max_pool2d(x, 2, return_indices=True)[0].sum().backward(),
        "avg_pool": lambda: F.avg_pool2d(x, 3, 2).sum().backward(),
        "adaptive": lambda: F.adaptive_avg_pool2d(x, 7).sum().backward(),
        "adaptive_max": lambda: F.adaptive_max_pool2d(x, 5).sum().backward(),
        "lp_pool": lambda: F.lp_pool2d(x, 2, 2).sum().backward(),
        "fractional": lambda: F.fractional_max_pool2d(x, 2, output_size=8).sum().backward(),
        "unpool": lambda: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), [2, 2]).sum()
        .backward(),
        "nearest": lambda: F.interpolate(x, scale_factor=2).sum().backward(),
        "bicubic": lambda: F.interpolate(x, 50, mode="bicubic").sum().backward(),
        "antialias": lambda: F.interpolate(x, 20, mode="bilinear", antialias=True).sum().backward(),
        "grid_sample": lambda: F.grid_sample(x, grid, align_corners=False).sum().backward(),
        "affine_grid": lambda: F.affine_grid(random(2, 2, 3), [2, 8, 16, 16], align_corners=False),
        "unfold": lambda: F.fold(F.unfold(x, 4, stride=4), 32, 4, stride=4).sum().backward(),
        "pixel_shuffle": lambda: F.pixel_shuffle(x, 2).sum().backward(),
        "reflect": lambda: F.pad(x, (2, 2, 2, 2), "reflect").sum().backward(),
        "circular": lambda: F.pad(x, (2, 2, 2, 2), "circular").sum().backward(),
        "cdist": lambda: torch.cdist(x.flatten(2), x.flatten(2)).sum().backward(),
        "einsum": lambda: torch.einsum("bchw,bdhw->bcd", x, x).sum().backward(),
        "instance_norm": lambda: F.instance_norm(x).sum().backward(),
        "local_response": lambda: F.local_response_norm(x, 3).sum().backward(),
    })  # fmt: skip
