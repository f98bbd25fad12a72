"""Accelerate with all that asks for a backend's name: torchrun ... accelerate_evaluation.py BACKEND

It calls its backend "gloo" on a CPU, whatever the group is. The second pass gives it the group's
own name, as on a GPU: it gathers by another call then.
"""

import sys
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState
from accelerate.utils import broadcast, broadcast_object_list, gather_object, reduce
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import rota  # noqa: F401  (registers the backend)

torch.set_num_threads(1)
BACKEND = sys.argv[1]
dist.init_process_group(BACKEND)
accelerator = Accelerator(cpu=True)


def collectives() -> list[Any]:
    rank = accelerator.process_index
    integers = torch.tensor([-7, 4, 2**40]) * (rank + 1)
    nested = {"float": torch.full((2, 3), 0.1 * rank), "flag": torch.tensor(rank == 0)}
    gathered = accelerator.gather(nested)
    return [
        {name: value.tolist() for name, value in gathered.items()},
        accelerator.gather(integers.view(1, 3).expand(2, 3)[:, ::2]).tolist(),
        accelerator.reduce(integers.clone(), reduction="sum").tolist(),
        reduce(integers.float(), reduction="mean").tolist(),
        accelerator.pad_across_processes(torch.ones(2 + rank), dim=0).tolist(),
        broadcast(integers.clone(), from_process=1).tolist(),
        gather_object([rank, "text"]),
        broadcast_object_list([rank], from_process=1),
    ]


def evaluate(model: nn.Module, loader: DataLoader[Any]) -> list[float]:
    """70 rows, which batches of 8 on 2 ranks do not divide."""
    rows: list[float] = []
    with torch.inference_mode():
        for inputs, targets in loader:
            errors = (model(inputs) - targets).square()
            rows += accelerator.gather_for_metrics(errors).flatten().tolist()
    assert len(rows) == 70
    return rows


generator = torch.Generator().manual_seed(1)
inputs = torch.randn(70, 8, generator=generator)
loader: Any = DataLoader(TensorDataset(inputs, inputs.mean(1, keepdim=True)), 8)
torch.manual_seed(0)
model, loader = accelerator.prepare(nn.Linear(8, 1), loader)
results: list[Any] = []
for name in ("gloo", BACKEND):
    PartialState._shared_state["backend"] = name
    results += [collectives(), evaluate(model.eval(), loader)]
    if accelerator.is_main_process:
        accelerator.set_trigger()
    results.append(accelerator.check_trigger())
    accelerator.wait_for_everyone()
with accelerator.split_between_processes(list(range(5)), apply_padding=True) as part:
    results.append(part)
print(f"{BACKEND} rank {dist.get_rank()} results {results}")
accelerator.end_training()
