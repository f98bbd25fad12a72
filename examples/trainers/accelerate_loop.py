"""Accelerate: torchrun --standalone --nproc-per-node 2 examples/trainers/accelerate_loop.py"""

import sys

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.utils.data import DataLoader

import rota  # noqa: F401  (registers the backend)
from task import BATCH_SIZE, Model, make_dataset, report

backend = sys.argv[1] if len(sys.argv) > 1 else "rota"
dist.init_process_group(backend)  # before Accelerator(), which would make a group of Gloo
accelerator = Accelerator(cpu=True)

model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
loader = DataLoader(make_dataset(accelerator.num_processes), BATCH_SIZE)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
losses = []
for inputs, targets in loader:
    loss = model(inputs, targets)["loss"]
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(accelerator.gather(loss.detach()).mean().item())
report(losses)
accelerator.end_training()  # also destroys the group
