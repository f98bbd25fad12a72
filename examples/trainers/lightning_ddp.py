"""PyTorch Lightning: torchrun --standalone --nproc-per-node 2 examples/trainers/lightning_ddp.py"""

import sys

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.utils.data import DataLoader

import rota  # noqa: F401  (registers the backend)
from task import BATCH_SIZE, Model, make_dataset, report

backend = sys.argv[1] if len(sys.argv) > 1 else "rota"
WORLD_SIZE = 2


class Module(lightning.LightningModule):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.model = Model()
        self.losses: list[float] = []

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss: Tensor = self.model(*batch)["loss"]
        self.losses.append(loss.item())
        self.log("loss", loss, sync_dist=True)  # an all-reduce of Lightning's own
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


trainer = lightning.Trainer(
    accelerator="cpu",
    devices=WORLD_SIZE,
    strategy=DDPStrategy(process_group_backend=backend),
    max_epochs=1,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
module = Module()
trainer.fit(module, DataLoader(make_dataset(WORLD_SIZE), BATCH_SIZE))
report(module.losses)
