"""Data-parallel training with rota: torchrun --standalone --nproc-per-node 2 examples/ddp.py"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import rota  # registers the backend "rota"

dist.init_process_group("rota")
torch.manual_seed(dist.get_rank())
ddp = DistributedDataParallel(torch.nn.Linear(64, 1))
state = rota.HookState(model=ddp, wire_dtype=torch.float16)
ddp.register_comm_hook(state, rota.fused_hook)  # optional: 16 bits between ranks, float32 sums
optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01, fused=True)
for step in range(200):
    inputs = torch.randn(32, 64)
    loss = (ddp(inputs) - inputs.mean(dim=1, keepdim=True)).square().mean()
    loss.backward()
    norm = rota.clip_grad_norm_(ddp.parameters(), max_norm=1.0, optimizer=optimizer)
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0 and step % 50 == 0:
        print(f"step {step}: loss {loss.item():.5f}, gradient norm {norm.item():.4f}")
dist.destroy_process_group()
