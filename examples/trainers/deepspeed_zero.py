"""DeepSpeed: torchrun --standalone --nproc-per-node 2 examples/trainers/deepspeed_zero.py"""

import os
import sys
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # before DeepSpeed is imported

import deepspeed
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

import rota  # noqa: F401  (registers the backend)
from task import BATCH_SIZE, Model, make_dataset, report

backend = sys.argv[1] if len(sys.argv) > 1 else "rota"
dist.init_process_group(backend)  # before deepspeed.initialize(), which takes it as it is

model = Model()
engine, _, _, _ = deepspeed.initialize(
    model=model,
    optimizer=torch.optim.AdamW(model.parameters(), lr=0.01),
    config={
        "train_micro_batch_size_per_gpu": BATCH_SIZE,
        "zero_optimization": {"stage": 2},
        "zero_allow_untested_optimizer": True,
    },
)
dataset = make_dataset(dist.get_world_size())
sampler: DistributedSampler[Any] = DistributedSampler(dataset, shuffle=False)
losses = []
for inputs, targets in DataLoader(dataset, BATCH_SIZE, sampler=sampler):
    loss = engine(inputs, targets)["loss"]
    engine.backward(loss)
    engine.step()
    losses.append(loss.item())
report(losses)
dist.destroy_process_group()
