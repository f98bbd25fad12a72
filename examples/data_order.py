"""The order of the demo's samples: the same over any number of ranks, resumable at any step.

data_loader() serves windows of a text of examples/data_cache.py. Nothing here communicates: the
order follows from the seed, and a rank's part of it from its number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.utils.data import Dataset, Sampler

from rota.gradients.rounding import split_mix_64

if TYPE_CHECKING:
    from data_cache import Text


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Sample i is (inputs, targets), both int64 [context]: inputs start at byte i * context, and
    targets are one byte ahead, so that an epoch predicts each byte once."""

    def __init__(self, text: Text, context: int) -> None:
        self._text = text
        self._context = context

    def __len__(self) -> int:
        return (len(self._text) - 1) // self._context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        begin = index * self._context
        block = self._text.read(begin, begin + self._context + 1).long()
        return block[:-1], block[1:]


class Permutation:
    """A random permutation of range(num_samples) for one epoch, computed index by index.

    A Feistel network permutes the next power of four; results outside the range go through it again
    until one is inside (cycle walking, Black & Rogaway 2002). Unlike torch.randperm it takes no
    memory, no time at a start (5 to 20 ms for the demo's 221,000 samples), and has one result in
    every release of torch, so that a saved position stays valid. An index takes 6 to 20 µs.
    """

    NUM_ROUNDS = 6  # four suffice for large halves (Luby & Rackoff 1988)

    def __init__(self, num_samples: int, seed: int, epoch: int) -> None:
        self._num_samples = num_samples
        self._half_bits = max(1, ((num_samples - 1).bit_length() + 1) // 2)
        key = split_mix_64(seed, epoch)
        self._keys = [split_mix_64(key, index) for index in range(self.NUM_ROUNDS)]

    def __getitem__(self, position: int) -> int:
        index = self._network(position)
        while index >= self._num_samples:
            index = self._network(index)
        return index

    def _network(self, index: int) -> int:
        left, right = index >> self._half_bits, index & ((1 << self._half_bits) - 1)
        for key in self._keys:
            left, right = right, left ^ (split_mix_64(key, right) >> (64 - self._half_bits))
        return left << self._half_bits | right


class GlobalBatchSampler(Sampler[list[int]]):
    """This rank's part of every global batch, in an order that is the same for all world sizes.

    An epoch is the Permutation of its number and the seed. A global batch is the next
    `global_batch` samples of it, of which each rank takes one block, in ascending rank, as the
    ranks of rota.LogicalShards do. Epochs follow each other without end; samples that do not fill
    a global batch are left out of an epoch.

    The position is the iterator's: its state_dict() is the same on every rank, and may be loaded
    with another world size or global batch.

    Args:
        global_batch: samples of all ranks in a step. Where world_size does not divide it, blocks
            differ by one sample, and DDP's mean over ranks is not the mean over samples.
        seed: in [0, 2**64); the same on every rank.

    Raises:
        ValueError: the global batch is smaller than world_size or larger than num_samples.
    """

    def __init__(
        self, num_samples: int, global_batch: int, *, seed: int, rank: int, world_size: int
    ) -> None:
        if not world_size <= global_batch <= num_samples:
            raise ValueError(
                f"a global batch of {global_batch}, expected at least one sample for each of "
                f"{world_size} ranks and at most the {num_samples} samples of an epoch"
            )
        self.num_samples = num_samples
        self.global_batch = global_batch
        self.seed = seed
        self.block = range(
            global_batch * rank // world_size, global_batch * (rank + 1) // world_size
        )

    def __iter__(self) -> GlobalBatches:
        return GlobalBatches(self)


class GlobalBatches(Iterator[list[int]]):
    """The iterator of a GlobalBatchSampler; StatefulDataLoader saves and loads its state."""

    def __init__(self, sampler: GlobalBatchSampler) -> None:
        self._sampler = sampler
        self._go_to(epoch=0, num_consumed=0)

    def _go_to(self, epoch: int, num_consumed: int) -> None:
        self._epoch = epoch
        self._num_consumed = num_consumed  # samples of this epoch, by all ranks
        self._order = Permutation(self._sampler.num_samples, self._sampler.seed, epoch)

    def __next__(self) -> list[int]:
        if self._num_consumed + self._sampler.global_batch > self._sampler.num_samples:
            self._go_to(self._epoch + 1, 0)
        begin = self._num_consumed
        self._num_consumed += self._sampler.global_batch
        return [self._order[begin + offset] for offset in self._sampler.block]

    def state_dict(self) -> dict[str, int]:
        return {
            "num_samples": self._sampler.num_samples,
            "seed": self._sampler.seed,
            "epoch": self._epoch,
            "num_consumed": self._num_consumed,
        }

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        """Goes on after the samples that the saved run has consumed.

        Raises:
            ValueError: that run had another number of samples or another seed.
        """
        for name in ("num_samples", "seed"):
            own, saved = getattr(self._sampler, name), state_dict[name]
            if own != saved:
                raise ValueError(f"the saved order has {name} {saved}, this one {own}")
        self._go_to(state_dict["epoch"], state_dict["num_consumed"])


def data_loader(
    text: Text,
    context: int,
    global_batch: int,
    *,
    seed: int,
    rank: int,
    world_size: int,
    num_workers: int = 0,
) -> Any:
    """A torchdata StatefulDataLoader without end, of [inputs, targets]: this rank's Windows in the
    order of GlobalBatchSampler. Any rank's state_dict() resumes all, with any world size, but with
    the same num_workers."""
    from torchdata.stateful_dataloader import StatefulDataLoader  # read_corpus() does without

    windows = Windows(text, context)
    sampler = GlobalBatchSampler(
        len(windows), global_batch, seed=seed, rank=rank, world_size=world_size
    )
    return StatefulDataLoader(windows, batch_sampler=sampler, num_workers=num_workers)
