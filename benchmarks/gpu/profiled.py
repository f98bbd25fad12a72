"""Launches pack, unpack and two_shot_in_place on 64 MiB (or --small), to be profiled by ncu."""

from __future__ import annotations

import sys

import torch

import rota

num_elems = 4096 if sys.argv[1:] == ["--small"] else 16 << 20
tensors = [torch.randn(num_elems, device="cuda") for _ in range(4)]
group = rota.LocalGroup(4)
for tensor in tensors[:2]:
    bucket = rota.GradientBucket([tensor], wire_dtype=torch.float16)
    bucket.pack()
    bucket.unpack()
    group.all_reduce(tensors, "avg", "two_shot_in_place")
torch.cuda.synchronize()
