"""The workloads on which finders are compared, each on a virtual card that it nearly fills."""

from __future__ import annotations

from collections.abc import Mapping

from memfit.records import Precision
from tests.benchmarks.draws import TARGET as DRAWN
from tests.benchmarks.scan import EXAMPLES, Setting

CASES: Mapping[str, Setting] = {
    "transformer": Setting(),
    "CNN": Setting(target=str(EXAMPLES / "resnet50.py"), card="rtx-4060"),
    "recurrent": Setting(
        target=DRAWN,
        card="rtx-4060",
        precision=Precision.FP32,
        parameters={
            "kind": "rnn",
            "depth": "2",
            "width": "1024",
            "length": "384",
            "classes": "8192",
        },
    ),
    "MLP": Setting(
        target=DRAWN,
        card="rtx-4060",
        precision=Precision.FP32,
        parameters={
            "kind": "mlp",
            "depth": "6",
            "width": "2048",
            "length": "512",
            "update": "momentum",
        },
    ),
    "checkpointed": Setting(
        target=DRAWN,
        card="rtx-4090",
        parameters={
            "kind": "transformer",
            "depth": "24",
            "width": "1024",
            "length": "1024",
            "classes": "32000",
            "checkpointed": "True",
            "update": "adamw fused",
        },
    ),
    "compiled": Setting(target="tests.benchmarks.workloads.compiled:Compiled", card="rtx-4060"),
    "fp16": Setting(
        target=DRAWN,
        card="rtx-3090",
        precision=Precision.FP16,
        parameters={
            "kind": "transformer",
            "depth": "12",
            "width": "768",
            "length": "512",
            "classes": "32000",
        },
    ),
    "7B": Setting(target=str(EXAMPLES / "llama.py"), card="h100-80gb", precision=Precision.FP32),
}
DESCRIPTIONS: Mapping[str, str] = {
    "transformer": "GPT-2 124M, 1,024 tokens, bf16 autocast, AdamW",
    "CNN": "ResNet-50, 224-pixel images, bf16 autocast, SGD with momentum",
    "recurrent": "two LSTM layers of 1,024 over 384 tokens, fp32, AdamW",
    "MLP": "six layers of 2,048 over 512 positions, fp32, SGD with momentum",
    "checkpointed": "24 blocks of 1,024, 1,024 tokens, each block checkpointed, bf16 autocast, "
    "fused AdamW",
    "compiled": "an MLP of two layers of 1,024 under torch.compile, bf16 autocast, AdamW",
    "fp16": "12 blocks of 768, 512 tokens, fp16 autocast with a scaler, AdamW",
    "7B": "Llama 7B, 2,048 tokens, bf16 weights, checkpointed, AdamW",
}
