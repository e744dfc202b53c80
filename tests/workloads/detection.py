"""torchvision's Faster R-CNN as its own training reference sets it up, on images of one size."""

import torch
from torchvision.models import resnet50
from torchvision.models.detection import FasterRCNN
from torchvision.models.detection.backbone_utils import BackboneWithFPN
from torchvision.ops.misc import FrozenBatchNorm2d

import memfit


class Detection(memfit.Workload):
    height: int = 800
    width: int = 1333
    objects: int = 7

    def model(self):
        body = resnet50(weights=None, norm_layer=FrozenBatchNorm2d)
        for name, parameter in body.named_parameters():
            parameter.requires_grad_(name.startswith(("layer2", "layer3", "layer4")))
        layers = {f"layer{i}": str(i - 1) for i in range(1, 5)}
        backbone = BackboneWithFPN(body, layers, [256, 512, 1024, 2048], 256)
        return FasterRCNN(backbone, num_classes=91)

    def optimizer(self, model):
        trained = [p for p in model.parameters() if p.requires_grad]
        return torch.optim.SGD(trained, lr=0.02, momentum=0.9, weight_decay=1e-4)

    def batch(self, m):
        at = torch.arange(self.objects, device=self.device) * 40.0
        boxes = torch.stack([at, at, at + 120, at + 200], 1)
        labels = torch.arange(1, self.objects + 1, device=self.device)
        images = [torch.rand(3, self.height, self.width, device=self.device) for _ in range(m)]
        return images, [{"boxes": boxes, "labels": labels} for _ in images]

    def loss(self, model, batch):
        return torch.stack(list(model(*batch).values())).sum()
