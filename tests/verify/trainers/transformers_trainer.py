"""Transformers' Trainer over microbatches of 2 and 4 accumulation steps, as its guide has it.

The one word is `counted`, for the model as it is, or `uncounted`, for a model whose forward does
not take `num_items_in_batch`, as those of older files do.
"""

from __future__ import annotations

import sys
import tempfile
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from tests.verify.trainers.data import LONGEST, VOCABULARY, examples


class Uncounted(torch.nn.Module):
    """The same model behind a forward that averages over its own microbatch."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Any, attention_mask: Any, labels: Any) -> Any:
        return self.model(input_ids=input_ids, attention_mask=attention_mask, labels=labels)


def main() -> None:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=LONGEST,
        n_embd=32,
        n_layer=2,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    model: Any = GPT2LMHeadModel(config)
    if sys.argv[1] == "uncounted":
        model = Uncounted(model)
    data: Any = examples()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=4,
            num_train_epochs=2,
            learning_rate=1e-3,
            report_to=[],
            save_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
        )
        Trainer(model=model, args=arguments, train_dataset=data).train()


if __name__ == "__main__":
    main()
