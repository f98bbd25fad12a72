"""Transformers' Trainer with evaluation: torchrun ... transformers_evaluation.py BACKEND

Metrics over all ranks, early stopping, checkpoints, the best model at the end, and predictions.
"""

import sys
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import broadcast_object_list
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import EarlyStoppingCallback, Trainer, TrainingArguments

import rota  # noqa: F401  (registers the backend)

torch.set_num_threads(1)
BACKEND = sys.argv[1]
dist.init_process_group(BACKEND)


class Rows(Dataset[dict[str, Tensor]]):
    """70, which batches of 8 on 2 ranks do not divide."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(70, 8, generator=generator)
        self.labels = torch.randint(0, 3, (70,), generator=generator)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"inputs": self.inputs[index], "labels": self.labels[index]}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.layers(inputs)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def metrics(evaluated: Any) -> dict[str, float]:
    assert len(evaluated.label_ids) == 70
    right = evaluated.predictions.argmax(1) == evaluated.label_ids
    return {"right": int(right.sum()), "top": float(evaluated.predictions.max())}


with tempfile.TemporaryDirectory() as own:
    arguments = TrainingArguments(
        output_dir=broadcast_object_list([own])[0],
        use_cpu=True,
        num_train_epochs=20,
        per_device_train_batch_size=8,
        per_device_eval_batch_size=8,
        gradient_accumulation_steps=2,
        learning_rate=0.02,
        eval_strategy="epoch",
        save_strategy="epoch",
        load_best_model_at_end=True,
        metric_for_best_model="loss",
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
        average_tokens_across_devices=True,
    )
    stopping = EarlyStoppingCallback(early_stopping_patience=2, early_stopping_threshold=0.5)
    trainer = Trainer(
        Model(),
        arguments,
        train_dataset=Rows(),
        eval_dataset=Rows(),
        compute_metrics=metrics,
        callbacks=[stopping],
    )
    trainer.train()
    assert dist.get_backend() == BACKEND
    assert trainer.state.epoch < 20, "training has not stopped early"
    predicted = trainer.predict(Rows()).predictions.tolist()
    dist.barrier()  # rank 0 deletes the folder
evaluations = [
    [entry["eval_loss"], entry["eval_right"], entry["eval_top"]]
    for entry in trainer.state.log_history
    if "eval_loss" in entry
]
print(f"{BACKEND} rank {dist.get_rank()} results {[trainer.state.epoch, evaluations, predicted]}")
dist.destroy_process_group()
