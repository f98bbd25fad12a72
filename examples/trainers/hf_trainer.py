"""Transformers: torchrun --standalone --nproc-per-node 2 examples/trainers/hf_trainer.py"""

import sys
import tempfile

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import Trainer, TrainingArguments

import rota  # noqa: F401  (registers the backend)
from task import BATCH_SIZE, Model, make_dataset, report

backend = sys.argv[1] if len(sys.argv) > 1 else "rota"
# Before TrainingArguments(), whose ddp_backend takes no name that it does not know.
dist.init_process_group(backend)


def collate(samples: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    inputs, targets = zip(*samples, strict=True)
    return {"inputs": torch.stack(inputs), "targets": torch.stack(targets)}


with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        num_train_epochs=1,
        per_device_train_batch_size=BATCH_SIZE,
        learning_rate=0.01,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    trainer = Trainer(
        Model(), arguments, data_collator=collate, train_dataset=make_dataset(arguments.world_size)
    )
    trainer.train()
logged = trainer.state.log_history
report([entry["loss"] for entry in logged if "loss" in entry])
dist.destroy_process_group()
