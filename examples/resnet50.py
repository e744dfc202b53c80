"""ResNet-50 on 224-pixel images in plain torch, as a memfit workload.

    memfit probe examples/resnet50.py --device a100-40gb --precision fp16

The network is the one of He et al. (2015), "Deep Residual Learning for Image Recognition", with
the stride of a bottleneck in its 3x3 convolution.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import memfit


def convolution(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Sequential:
    """A convolution and the batch normalisation that follows it."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False),
        nn.BatchNorm2d(outputs),
    )


class Bottleneck(nn.Module):
    """1x1 down, 3x3, 1x1 up, added to its input."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.reduce = convolution(inputs, width, 1)
        self.spatial = convolution(width, width, 3, stride)
        self.expand = convolution(width, outputs, 1)
        same = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same else convolution(inputs, outputs, 1, stride)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.reduce(x))
        y = self.relu(self.spatial(y))
        result: Tensor = self.relu(self.expand(y) + self.shortcut(x))
        return result


def resnet50(classes: int) -> nn.Sequential:
    """Four stages of 3, 4, 6 and 3 bottlenecks on a stem of stride 4."""
    layers: list[nn.Module] = [convolution(3, 64, 7, stride=2), nn.ReLU(inplace=True)]
    layers.append(nn.MaxPool2d(3, stride=2, padding=1))
    channels = 64
    for stage, (width, depth) in enumerate([(64, 3), (128, 4), (256, 6), (512, 3)]):
        for index in range(depth):
            stride = 2 if stage > 0 and index == 0 else 1
            layers.append(Bottleneck(channels, width, stride))
            channels = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, classes))


class ResNet50(memfit.Workload):
    """ResNet-50 on square images, SGD with momentum."""

    image: int = 224
    classes: int = 1000
    channels_last: bool = False

    verify_with = {"image": 64}

    def model(self) -> nn.Module:
        model = resnet50(self.classes)
        return model.to(memory_format=torch.channels_last) if self.channels_last else model

    def batch(self, m: int) -> tuple[Tensor, Tensor]:
        images = torch.randn(m, 3, self.image, self.image, device=self.device)
        labels = torch.randint(self.classes, (m,), device=self.device)
        if self.channels_last:
            images = images.contiguous(memory_format=torch.channels_last)
        return images, labels

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        images, labels = batch
        return F.cross_entropy(model(images), labels)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
