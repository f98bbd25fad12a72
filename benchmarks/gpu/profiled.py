"""Launches unpack, pack to e4m3, ring and two_shot on 64 MiB (or --small), for a profiler."""

from __future__ import annotations

import sys

import torch

from rota.gpu import GradientBucket, LocalGroup

num_elems = 4096 if sys.argv[1:] == ["--small"] else 16 << 20
tensors = [torch.randn(num_elems, device="cuda") for _ in range(4)]
group = LocalGroup(4)
for wire_dtype in (torch.float16, torch.float8_e4m3fn):
    bucket = GradientBucket([tensors[0]], wire_dtype=wire_dtype)
    bucket.pack()
    bucket.unpack()
for algorithm in ("ring", "two_shot"):
    group.all_reduce(tensors, "avg", algorithm)
torch.cuda.synchronize()
