"""The order of the demo's samples: the same over any number of ranks, resumable at any step.
Nothing here communicates: the order follows from the seed, and a rank's part from its number.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Sample i is (inputs, targets), both int64 [context]: inputs start at byte i * context, and
    targets are one byte ahead, so that an epoch predicts each byte once."""

    def __init__(self, text: Tensor, context: int) -> None:
        self._blocks = text.unfold(0, context + 1, context)

    def __len__(self) -> int:
        return len(self._blocks)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        block = self._blocks[index].long()
        return block[:-1], block[1:]


class GlobalBatchSampler(Iterator[list[int]]):
    """This rank's part of every global batch, in an order that is the same for all world sizes.

    An epoch is a permutation by its number and the seed, of a generator that numpy has frozen, so
    that a saved position stays valid. A global batch is the next `global_batch` samples of it, of
    which each rank takes one block, in ascending rank; where world_size does not divide it, blocks
    differ by one sample. What does not fill a global batch is left out of an epoch.

    The state_dict(), which StatefulDataLoader saves and loads, is the same on every rank, and may
    be loaded with another world size or global batch.
    """

    def __init__(
        self, num_samples: int, global_batch: int, *, seed: int, rank: int, world_size: int
    ) -> None:
        if not world_size <= global_batch <= num_samples:
            raise ValueError(
                f"a global batch of {global_batch}, expected at least one sample for each of "
                f"{world_size} ranks and at most the {num_samples} samples of an epoch"
            )
        self._run = {"num_samples": num_samples, "seed": seed}
        self._global_batch = global_batch
        self._block = slice(
            global_batch * rank // world_size, global_batch * (rank + 1) // world_size
        )
        self._begin(epoch=0)

    def _begin(self, epoch: int, num_consumed: int = 0) -> None:
        self._epoch, self._num_consumed = epoch, num_consumed  # samples of this epoch, by all ranks
        generator = np.random.RandomState([self._run["seed"], epoch])
        self._order = generator.permutation(self._run["num_samples"])

    def __next__(self) -> list[int]:
        if self._num_consumed + self._global_batch > len(self._order):
            self._begin(self._epoch + 1)
        batch = self._order[self._num_consumed :][: self._global_batch]
        self._num_consumed += self._global_batch
        samples: list[int] = batch[self._block].tolist()
        return samples

    def state_dict(self) -> dict[str, int]:
        return {**self._run, "epoch": self._epoch, "num_consumed": self._num_consumed}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        for name, own in self._run.items():
            if own != state_dict[name]:
                raise ValueError(f"the saved order has {name} {state_dict[name]}, this one {own}")
        self._begin(state_dict["epoch"], state_dict["num_consumed"])


def data_loader(
    text: Tensor, context: int, global_batch: int, num_workers: int = 0, **order: int
) -> Any:
    """A StatefulDataLoader without end, of [inputs, targets]: this rank's Windows, in the order of
    GlobalBatchSampler. Any rank's state_dict() resumes all, over the same num_workers."""
    from torchdata.stateful_dataloader import StatefulDataLoader  # read_corpus() does without

    windows = Windows(text, context)
    sampler = GlobalBatchSampler(len(windows), global_batch, **order)
    return StatefulDataLoader(windows, batch_sampler=sampler, num_workers=num_workers)
