"""Lightning with all that asks for a backend's name: torchrun ... lightning_validation.py BACKEND

Validation with metrics, and the collectives of its strategy, by which it stops early and saves.
"""

import logging
import sys
import tempfile
import warnings
from typing import Any

import lightning
import torch
import torch.distributed as dist
import torchmetrics
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import rota  # noqa: F401  (registers the backend)

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)
torch.set_num_threads(1)
BACKEND = sys.argv[1]


class Module(lightning.LightningModule):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Linear(8, 3)
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(3)
        self.gathered: list[Any] = []

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        logits, labels = self.layers(batch[0]), batch[1]
        self.accuracy(logits, labels)
        right = (logits.argmax(1) == labels).sum()
        self.log("accuracy", self.accuracy)
        self.log("loss", nn.functional.cross_entropy(logits, labels), sync_dist=True)
        self.log("rows", float(len(labels)), sync_dist=True, reduce_fx="sum")
        self.log("right", right, sync_dist=True, reduce_fx="sum")
        self.log("mean_right", right, sync_dist=True)
        self.log("top", logits.max(), sync_dist=True, reduce_fx="max")

    def on_validation_epoch_end(self) -> None:
        self.gathered = self.all_gather(torch.tensor([self.global_rank, 7])).tolist()


def strategy_calls(strategy: DDPStrategy) -> list[Any]:
    """What Lightning reduces as a string's name: of integers, too."""
    rank = strategy.global_rank
    integers = torch.tensor([-7, 4, 2**40], dtype=torch.int64) * (rank + 1)
    return [
        strategy.reduce(integers.clone(), reduce_op="mean").tolist(),
        strategy.reduce(integers.to(torch.uint8), reduce_op="avg").tolist(),
        strategy.reduce(integers.clone(), reduce_op="sum").tolist(),
        strategy.reduce(torch.tensor(0.1 * (rank + 1)), reduce_op="mean").item(),
        strategy.reduce_boolean_decision(rank == 0, all=False),
        strategy.reduce_boolean_decision(rank == 0, all=True),
        strategy.broadcast({"rank": rank}, src=1),
    ]


generator = torch.Generator().manual_seed(1)
inputs = torch.randn(70, 8, generator=generator)
labels = torch.randint(0, 3, (70,), generator=generator)
with tempfile.TemporaryDirectory() as folder:
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(process_group_backend=BACKEND),
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Module()
    loader = DataLoader(TensorDataset(inputs, labels), 8)
    seen = trainer.validate(module, loader, verbose=False)
    assert dist.get_backend() == BACKEND
    calls = strategy_calls(trainer.strategy)
    trainer.strategy.barrier()
print(f"{BACKEND} rank {dist.get_rank()} results {[seen, module.gathered, calls]}")
