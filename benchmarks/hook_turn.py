"""A DDP communication hook as a call to time: on a real bucket, without a model.

No postponed annotations here: DDP compares a hook's annotations with the types themselves.
"""

from collections.abc import Callable
from functools import lru_cache
from types import ModuleType

import torch
import torch.distributed as dist
from torch.distributed import GradBucket  # imported there, not listed
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import tiles
from protocol import Turn

# An entry's api: a hook of torch, or rota's equivalent.
TORCH_HOOK = "torch hook"
ROTA_HOOK = "rota hook"


class OneParameter(torch.nn.Module):
    """A model whose one gradient fills one bucket of `num_elems`."""

    def __init__(self, num_elems: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(num_elems))

    def forward(self) -> torch.Tensor:
        return self.weight.sum()


@lru_cache(maxsize=1)  # all entries use the same memory
def make_bucket(num_elems: int, group: dist.ProcessGroup | None = None) -> GradBucket:
    """A float32 bucket as DDP passes it to a hook; only DDP can make a GradBucket.

    Its memory is the gradient of its one parameter, so a reduced bucket is a reduced gradient.
    """
    buckets = []

    def keep(state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        buckets.append(bucket)
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    model = torch.nn.parallel.DistributedDataParallel(
        OneParameter(num_elems), process_group=group, gradient_as_bucket_view=True
    )
    model.register_comm_hook(None, keep)
    model().backward()
    return buckets[0]


def hook_call(
    turn: Turn, rota: ModuleType | None, group: dist.ProcessGroup | None
) -> tuple[Callable[[], torch.Tensor], int | None]:
    """The call that DDP makes for a bucket, and the number of wrong elements after a first call.

    Timed on zeros, like the collectives. Results are averages over ranks, so they are exact and can
    be checked only if world_size is a power of two.
    """
    hook = getattr(rota if turn.entry.api == ROTA_HOOK else default_hooks, turn.op)
    bucket = make_bucket(turn.num_elems)
    buffer = bucket.buffer()
    buffer.zero_()

    def call() -> torch.Tensor:
        result: torch.Tensor = hook(group, bucket).wait()
        return result

    world_size = dist.get_world_size()
    if turn.check_seed is None or world_size.bit_count() != 1:
        return call, None
    tiles.fill_with_input(buffer, dist.get_rank(), world_size, turn.check_seed)
    result = call()
    num_wrong = tiles.count_wrong(result, "all_reduce", world_size, turn.check_seed, world_size)
    buffer.zero_()
    return call, num_wrong
