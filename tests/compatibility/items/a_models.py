"""Kinds of models."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from tests.compatibility.catalogue import SLOW_S, item
from tests.compatibility.training import CARD, classify, integers, random, train

MODELS = "Models"


@item(MODELS, "transformer encoder")
def encoder() -> None:
    """nn.TransformerEncoder, 4 layers with padding mask, bf16 autocast."""
    layer = nn.TransformerEncoderLayer(256, 8, 1024, batch_first=True)
    model = nn.Sequential(nn.TransformerEncoder(layer, 4), nn.Linear(256, 10)).to(CARD)
    body, head = model[0], model[1]
    x = random(8, 128, 256)
    mask = torch.zeros(8, 128, dtype=torch.bool)
    mask[:, 100:] = True
    mask = mask.to(CARD)

    def loss() -> torch.Tensor:
        seen = head(body(x, src_key_padding_mask=mask))
        return F.cross_entropy(seen.flatten(0, 1), integers(10, 8 * 128))

    train(model, loss, autocast=torch.bfloat16)


@item(MODELS, "transformer decoder")
def decoder() -> None:
    """nn.Transformer, encoder and decoder with causal mask and cross-attention."""
    model = nn.Transformer(256, 8, 2, 2, 1024, batch_first=True).to(CARD)
    source, target = random(4, 64, 256), random(4, 48, 256)
    mask = nn.Transformer.generate_square_subsequent_mask(48, device=CARD)
    train(model, lambda: model(source, target, tgt_mask=mask, tgt_is_causal=True).square().mean())


@item(MODELS, "causal language model")
def language_model() -> None:
    """Embedding, causal attention, tied head, cross-entropy over 32,000 tokens, bf16 weights."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(32000, 256)
            self.qkv, self.out = nn.Linear(256, 768), nn.Linear(256, 256)
            self.norm = nn.RMSNorm(256)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.embed(x)
            q, k, v = (
                p.view(*p.shape[:2], 8, 32).transpose(1, 2) for p in self.qkv(h).chunk(3, -1)
            )
            seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            h = self.norm(h + self.out(seen.transpose(1, 2).flatten(2)))
            return F.linear(h, self.embed.weight)

    model = Model().to(CARD, torch.bfloat16)
    train(model, classify(model, integers(32000, 4, 256), 32000))


class _Bottleneck(nn.Module):
    def __init__(self, into: int, width: int, stride: int) -> None:
        super().__init__()
        out = 4 * width
        self.main = nn.Sequential(
            nn.Conv2d(into, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(True),
            nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(True),
            nn.Conv2d(width, out, 1, bias=False), nn.BatchNorm2d(out),
        )  # fmt: skip
        self.side = nn.Sequential(nn.Conv2d(into, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.main(x) + self.side(x), inplace=True)


def _resnet(layout: torch.memory_format) -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(True),
        nn.MaxPool2d(3, 2, 1), _Bottleneck(64, 64, 1), _Bottleneck(256, 128, 2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10),
    )  # fmt: skip
    model = model.to(CARD, memory_format=layout)  # type: ignore[call-overload]
    x = random(16, 3, 128, 128).to(memory_format=layout)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    train(model, classify(model, x, 10), optimizer=optimizer, autocast=torch.float16)


@item(MODELS, "ResNet, NCHW")
def resnet_nchw() -> None:
    """Bottleneck blocks, batch norm, SGD, fp16 autocast."""
    _resnet(torch.contiguous_format)


@item(MODELS, "ResNet, NHWC")
def resnet_nhwc() -> None:
    """The same in channels_last."""
    _resnet(torch.channels_last)


@item(MODELS, "convolutions under cudnn.benchmark")
def resnet_benchmark() -> None:
    """One bottleneck block with torch.backends.cudnn.benchmark, which tries every plan."""
    torch.backends.cudnn.benchmark = True
    model = nn.Sequential(_Bottleneck(64, 16, 1)).to(CARD)
    x = random(2, 64, 32, 32)
    train(model, lambda: model(x).square().mean(), autocast=torch.float16)


class _Next(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.deep = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width)
        self.wide, self.back = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.scale = nn.Parameter(torch.full((width,), 1e-6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(self.deep(x).permute(0, 2, 3, 1))
        return x + (self.scale * self.back(F.gelu(self.wide(h)))).permute(0, 3, 1, 2)


@item(MODELS, "ConvNeXt-like")
def convnext() -> None:
    """Depthwise 7x7, LayerNorm over channels, bf16 autocast, both layouts."""
    for layout in (torch.contiguous_format, torch.channels_last):
        model = nn.Sequential(
            nn.Conv2d(3, 96, 4, 4), _Next(96), _Next(96), nn.Conv2d(96, 192, 2, 2), _Next(192),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(192, 10),
        )  # fmt: skip
        model = model.to(CARD, memory_format=layout)  # type: ignore[call-overload]
        x = random(8, 3, 128, 128).to(memory_format=layout)
        train(model, classify(model, x, 10), autocast=torch.bfloat16)


@item(MODELS, "convolutions: 1d, 3d, transposed, dilated, grouped")
def convolutions() -> None:
    """Conv1d, Conv3d, ConvTranspose1d/2d/3d, dilation and groups, fp32 and fp16 autocast."""
    cases: list[tuple[nn.Module, tuple[int, ...]]] = [
        (nn.Sequential(nn.Conv1d(16, 32, 5, padding=2), nn.ConvTranspose1d(32, 16, 4, 2, 1)),
         (4, 16, 256)),
        (nn.Sequential(nn.Conv3d(4, 8, 3, padding=1), nn.ConvTranspose3d(8, 4, 2, 2)),
         (2, 4, 16, 32, 32)),
        (nn.Sequential(nn.ConvTranspose2d(16, 16, 4, 2, 1, groups=4),
                       nn.Conv2d(16, 16, 3, padding=4, dilation=4)), (4, 16, 32, 32)),
    ]  # fmt: skip
    for model, shape in cases:
        model.to(CARD)
        x = random(*shape, requires_grad=True)
        for kind in (None, torch.float16):
            train(model, lambda model=model, x=x: model(x).square().mean(), autocast=kind)  # type: ignore[misc]


def _recurrent(kind: Any, **options: int) -> None:
    rnn = kind(64, 96, num_layers=2, bidirectional=True, dropout=0.1, batch_first=True, **options)
    rnn.to(CARD)
    x = random(8, 50, 64)
    packed = nn.utils.rnn.pack_padded_sequence(x, torch.arange(50, 42, -1), batch_first=True)
    train(rnn, lambda: rnn(x)[0].square().mean())
    train(rnn, lambda: rnn(packed)[0].data.square().mean())
    train(rnn, lambda: rnn(x)[0].square().mean(), autocast=torch.float16)


@item(MODELS, "LSTM")
def lstm() -> None:
    """2 layers, both directions, dropout, with and without projection; packed; fp16 autocast."""
    _recurrent(nn.LSTM)
    _recurrent(nn.LSTM, proj_size=32)


@item(MODELS, "GRU")
def gru() -> None:
    """2 layers, both directions, dropout; packed sequences; fp16 autocast."""
    _recurrent(nn.GRU)


@item(MODELS, "RNN")
def rnn() -> None:
    """nn.RNN with tanh, packed sequences; LSTMCell and GRUCell in a loop."""
    _recurrent(nn.RNN)
    for cell in (nn.LSTMCell(32, 32, device=CARD), nn.GRUCell(32, 32, device=CARD)):

        def loss(cell: nn.Module = cell) -> torch.Tensor:
            state = None
            for _ in range(4):
                state = cell(random(4, 32), state)
            return (state[0] if isinstance(state, tuple) else state).square().mean()  # type: ignore[union-attr]

        train(cell, loss)


class _Double(nn.Sequential):
    def __init__(self, into: int, out: int) -> None:
        super().__init__(
            nn.Conv2d(into, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU(True),
            nn.Conv2d(out, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU(True),
        )  # fmt: skip


@item(MODELS, "segmentation U-Net")
def segmentation() -> None:
    """Skip connections, transposed and interpolated upsampling, cross-entropy and dice loss."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.three = _Double(3, 32), _Double(32, 64), _Double(64, 128)
            self.up = nn.ConvTranspose2d(128, 64, 2, 2)
            self.four, self.five = _Double(128, 64), _Double(96, 32)
            self.last = nn.Conv2d(32, 5, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            a = self.one(x)
            b = self.two(F.max_pool2d(a, 2))
            c = self.three(F.max_pool2d(b, 2))
            d = self.four(torch.cat([self.up(c), b], 1))
            up = F.interpolate(d, scale_factor=2, mode="bilinear")
            return self.last(self.five(torch.cat([up, a], 1)))

    model = Net().to(CARD)
    x, y = random(4, 3, 96, 96), integers(5, 4, 96, 96)

    def loss() -> torch.Tensor:
        scores = model(x)
        share = scores.softmax(1)
        wanted = F.one_hot(y, 5).permute(0, 3, 1, 2)
        dice = 1 - 2 * (share * wanted).sum() / (share.sum() + wanted.sum())
        return F.cross_entropy(scores, y) + dice

    train(model, loss, autocast=torch.bfloat16)


@item(MODELS, "diffusion U-Net with attention")
def diffusion() -> None:
    """Residual blocks with GroupNorm, time embedding, self- and cross-attention, noise loss."""

    class Residual(nn.Module):
        def __init__(self, into: int, out: int) -> None:
            super().__init__()
            self.first = nn.Sequential(
                nn.GroupNorm(8, into), nn.SiLU(), nn.Conv2d(into, out, 3, padding=1)
            )
            self.time = nn.Linear(128, out)
            self.second = nn.Sequential(
                nn.GroupNorm(8, out), nn.SiLU(), nn.Conv2d(out, out, 3, padding=1)
            )
            self.side = nn.Conv2d(into, out, 1)

        def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
            h = self.first(x) + self.time(F.silu(t))[:, :, None, None]
            return self.side(x) + self.second(h)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.time = nn.Sequential(nn.Linear(64, 128), nn.SiLU(), nn.Linear(128, 128))
            self.into = nn.Conv2d(4, 64, 3, padding=1)
            self.down, self.middle = Residual(64, 128), Residual(128, 128)
            self.see = nn.MultiheadAttention(128, 4, batch_first=True)
            self.read = nn.MultiheadAttention(128, 4, kdim=96, vdim=96, batch_first=True)
            self.up = Residual(192, 64)
            self.out = nn.Conv2d(64, 4, 3, padding=1)

        def forward(self, x: torch.Tensor, t: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
            angle = t[:, None] * torch.exp(torch.linspace(0, -9, 32, device=t.device))
            t = self.time(torch.cat([angle.sin(), angle.cos()], -1))
            a = self.into(x)
            h = self.middle(self.down(F.avg_pool2d(a, 2), t), t)
            seq = h.flatten(2).transpose(1, 2)
            seq = seq + self.see(seq, seq, seq, need_weights=False)[0]
            seq = seq + self.read(seq, words, words, need_weights=False)[0]
            h = F.interpolate(seq.transpose(1, 2).reshape(h.shape), scale_factor=2.0)
            return self.out(self.up(torch.cat([h, a], 1), t))

    model = Net().to(CARD)
    steps = torch.linspace(1, 0, 1000, device=CARD).cumprod(0)

    def loss() -> torch.Tensor:
        x, noise, t = random(4, 4, 32, 32), random(4, 4, 32, 32), integers(1000, 4)
        keep = steps[t][:, None, None, None]
        seen = model(keep.sqrt() * x + (1 - keep).sqrt() * noise, t.float(), random(4, 77, 96))
        return F.mse_loss(seen, noise)

    train(model, loss, autocast=torch.float16)


@item(MODELS, "vision transformer")
def vit() -> None:
    """Patches by a convolution, class token, 4 encoder layers with norm first, bf16 autocast."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patch = nn.Conv2d(3, 192, 16, 16)
            self.token = nn.Parameter(torch.zeros(1, 1, 192))
            self.place = nn.Parameter(torch.zeros(1, 197, 192))
            layer = nn.TransformerEncoderLayer(
                192, 3, 768, activation="gelu", batch_first=True, norm_first=True
            )
            self.body = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
            self.head = nn.Linear(192, 100)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.patch(x).flatten(2).transpose(1, 2)
            h = torch.cat([self.token.expand(len(x), -1, -1), h], 1) + self.place
            return self.head(self.body(h)[:, 0])

    model = Net().to(CARD)
    train(model, classify(model, random(8, 3, 224, 224), 100), autocast=torch.bfloat16)


@item(MODELS, "detection: Faster R-CNN", needs=("torchvision",), timeout_s=SLOW_S)
def detection() -> str:
    """The model fasterrcnn_resnet50_fpn, 2 images of 256 pixels, SGD, no pretrained weights."""
    from torchvision.models.detection import fasterrcnn_resnet50_fpn

    with CARD:
        model = fasterrcnn_resnet50_fpn(
            weights=None, weights_backbone=None, num_classes=3, min_size=256, max_size=256
        )
    images = [random(3, 256, 256) for _ in range(2)]
    boxes = torch.tensor([[10.0, 10.0, 100.0, 100.0], [50.0, 60.0, 200.0, 220.0]], device=CARD)
    wanted = [{"boxes": boxes, "labels": torch.tensor([1, 2], device=CARD)} for _ in images]
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(parameters, 0.01, momentum=0.9)
    for _ in range(2):
        losses = model(images, wanted)
        sum(losses.values()).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.state
    return f"{len(optimizer.state)} of {len(parameters)} parameters got gradients"
