"""torch alone: torchrun --standalone --nproc-per-node 2 examples/trainers/plain.py"""

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import rota  # noqa: F401  (registers the backend)
from task import BATCH_SIZE, Model, make_dataset, report

backend = sys.argv[1] if len(sys.argv) > 1 else "rota"
dist.init_process_group(backend)

dataset = make_dataset(dist.get_world_size())
sampler: DistributedSampler[Any] = DistributedSampler(dataset, shuffle=False)
model = DistributedDataParallel(Model())
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
losses = []
for inputs, targets in DataLoader(dataset, BATCH_SIZE, sampler=sampler):
    loss = model(inputs, targets)["loss"]
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
report(losses)
dist.destroy_process_group()
