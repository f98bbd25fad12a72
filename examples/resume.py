"""Training that is killed and goes on from memory, under torchrun:

    torchrun --standalone --nproc-per-node 2 --max-restarts 1 examples/resume.py

Rank 1 kills itself in the middle. torchrun then kills and starts all ranks; their states are still
with the keeper, and training ends as if nothing had happened.
"""

from __future__ import annotations

import os
import signal

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import rota

NUM_STEPS, KILL_AT = 60, 40
IS_FIRST_START = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"

dist.init_process_group("rota")
group = dist.group.WORLD
assert group is not None
rank = group.rank()
torch.manual_seed(0)
model = torch.nn.Linear(64, 1)
ddp = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
with rota.checkpoint.Checkpoint(group, "example") as checkpoint:
    first_step = 0
    found = checkpoint.load()
    if found is not None:
        model.load_state_dict(found[1]["model"])
        optimizer.load_state_dict(found[1]["optimizer"])
        first_step = found[0] + 1
    if rank == 0:
        print(f"starting with step {first_step}", flush=True)
    for step in range(first_step, NUM_STEPS):
        inputs = torch.randn(32, 64, generator=torch.Generator().manual_seed(step * 1000 + rank))
        loss = (ddp(inputs) - inputs.mean(dim=1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        checkpoint.save(step, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        if IS_FIRST_START and rank == 1 and step == KILL_AT:
            os.kill(os.getpid(), signal.SIGKILL)
    if rank == 0:
        print(f"after step {NUM_STEPS - 1}: loss {loss.item():.6f}", flush=True)
dist.destroy_process_group()
