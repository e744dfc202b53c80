"""Training loops that belong to libraries; models are made from their configuration."""

from __future__ import annotations

import importlib
import tempfile

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from tests.compatibility.catalogue import SLOW_S, item
from tests.compatibility.training import CARD, integers, train

TRAINERS = "Trainers"


class _Tokens(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(64) * 7 + index) % 1000
        return {"input_ids": tokens, "labels": tokens, "attention_mask": torch.ones_like(tokens)}


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=1000, n_positions=64, n_embd=128, n_layer=2, n_head=4)
    model: nn.Module = GPT2LMHeadModel(config)
    return model


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=1000, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    model: nn.Module = LlamaForCausalLM(config)
    return model


@item(TRAINERS, "transformers Trainer", needs=("transformers", "accelerate"), timeout_s=SLOW_S)
def trainer() -> str:
    """GPT-2 of 2 layers, 4 optimizer steps of 2 microbatches, bf16, checkpointing, a loader."""
    from transformers import Trainer, TrainingArguments

    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            output_dir=folder, max_steps=4, per_device_train_batch_size=4, bf16=True,
            gradient_accumulation_steps=2, gradient_checkpointing=True, report_to=[],
            save_strategy="no", logging_steps=2, dataloader_num_workers=1, disable_tqdm=True,
        )  # fmt: skip
        loop = Trainer(model=_gpt2(), args=settings, train_dataset=_Tokens())
        loop.train()
    assert loop.state.global_step == 4
    assert loop.optimizer is not None
    return f"{loop.state.global_step} optimizer steps"


@item(
    TRAINERS,
    "transformers Trainer, 2 processes",
    devices=2,
    ranks=2,
    needs=("transformers", "accelerate"),
    timeout_s=SLOW_S,
)
def trainer_of_ranks() -> None:
    """torchrun; the same over NCCL."""
    trainer()


@item(TRAINERS, "models of transformers", needs=("transformers",), timeout_s=SLOW_S)
def models() -> str:
    """BERT, T5, Llama, ViT and Mixtral of 2 layers from their configuration, 2 steps."""
    from transformers import (
        BertConfig,
        BertForMaskedLM,
        MixtralConfig,
        MixtralForCausalLM,
        T5Config,
        T5ForConditionalGeneration,
        ViTConfig,
        ViTForImageClassification,
    )

    small = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4}
    tokens = integers(1000, 2, 32)
    text = {"input_ids": tokens, "labels": tokens}
    image = {"pixel_values": torch.randn(2, 3, 32, 32, device=CARD), "labels": integers(2, 2)}
    cases = {
        "BERT": (BertForMaskedLM(BertConfig(vocab_size=1000, **small, **heads)), text),
        "T5": (
            T5ForConditionalGeneration(
                T5Config(vocab_size=1000, d_model=128, d_ff=256, num_layers=2, num_heads=4,
                         decoder_start_token_id=0)
            ),
            text,
        ),
        "Llama": (_llama(), text),
        "ViT": (ViTForImageClassification(ViTConfig(image_size=32, **small, **heads)), image),
        "Mixtral": (
            MixtralForCausalLM(
                MixtralConfig(vocab_size=1000, num_key_value_heads=2, num_local_experts=4,
                              **small, **heads)
            ),
            text,
        ),
    }  # fmt: skip
    for name, (model, batch) in cases.items():
        model.to(CARD)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert optimizer.state, name
    return ", ".join(cases)


@item(TRAINERS, "Lightning Trainer", needs=("lightning",), timeout_s=SLOW_S)
def lightning() -> str:
    """Fits for 4 optimizer steps in bf16-mixed with accumulation, then fp16-mixed."""
    return _lightning(devices=1, strategy="auto")


@item(
    TRAINERS,
    "Lightning DDP, 2 processes",
    devices=2,
    ranks=2,
    needs=("lightning",),
    timeout_s=SLOW_S,
)
def lightning_of_ranks() -> str:
    """torchrun; the same over NCCL, with metrics of all ranks and synchronised batch norm."""
    return _lightning(devices=2, strategy="ddp")


def _lightning(*, devices: int, strategy: str) -> str:
    import lightning as pl

    class Model(pl.LightningModule):  # type: ignore[misc, unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            layers = nn.Linear(128, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 10)
            self.net = nn.Sequential(*layers)

        def training_step(self, batch: torch.Tensor, _index: int) -> torch.Tensor:
            loss: torch.Tensor = self.net(batch).square().mean()
            self.log("loss", loss, sync_dist=True)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    done = []
    for precision in ("bf16-mixed", "16-mixed"):
        with tempfile.TemporaryDirectory() as folder:
            loop = pl.Trainer(
                accelerator="gpu", devices=devices, strategy=strategy, precision=precision,
                max_steps=4, sync_batchnorm=devices > 1,
                accumulate_grad_batches=2, logger=False, enable_checkpointing=False,
                enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
                gradient_clip_val=1.0,
            )  # fmt: skip
            loop.fit(Model(), DataLoader(torch.randn(64 * devices, 128), 8))  # type: ignore[arg-type]
        assert loop.global_step == 4
        done.append(f"{precision}: {loop.global_step} optimizer steps")
    return ", ".join(done)


@item(TRAINERS, "Accelerate loop", needs=("accelerate",), timeout_s=SLOW_S)
def accelerate() -> None:
    """prepare, accumulate, backward, clip_grad_norm_, fp16 with its scaler."""
    from accelerate import Accelerator

    outside = Accelerator(mixed_precision="fp16", gradient_accumulation_steps=2)
    model = nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(model.parameters())
    data = DataLoader(torch.randn(64, 128), 8)  # type: ignore[arg-type, var-annotated]
    model, optimizer, data = outside.prepare(model, optimizer, data)
    for batch in data:
        with outside.accumulate(model):
            outside.backward(model(batch).square().mean())
            if outside.sync_gradients:
                outside.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    assert len(optimizer.state) == 4


@item(
    TRAINERS,
    "Accelerate loop, 2 processes",
    devices=2,
    ranks=2,
    needs=("accelerate",),
    timeout_s=SLOW_S,
)
def accelerate_of_ranks() -> None:
    """torchrun; the same over NCCL, and what it gathers from both ranks."""
    from accelerate import Accelerator
    from accelerate.utils import gather_object

    accelerate()
    outside = Accelerator()
    rank = outside.process_index
    assert gather_object(["rank", rank]) == ["rank", 0, "rank", 1]
    assert outside.gather(torch.tensor([rank + 1], device=CARD)).tolist() == [1, 2]
    outside.end_training()


@item(TRAINERS, "PEFT LoRA", needs=("transformers", "peft"), timeout_s=SLOW_S)
def lora() -> str:
    """Llama of 2 layers with LoRA on the attention, only the adapters trained."""
    peft = importlib.import_module("peft")

    config = peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(_llama(), config).to(CARD)
    tokens = integers(1000, 2, 64)
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights)
    train(
        model,
        lambda: model(input_ids=tokens, labels=tokens).loss,
        optimizer=optimizer,
        autocast=torch.bfloat16,
    )
    return f"{len(weights)} adapter tensors"
