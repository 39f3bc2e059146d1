"""Packs: samples put together up to a budget of tokens, the same ones for any number of ranks.

All of it follows from sample ids, token counts and a seed, so that the number of an optimizer step is the whole state
of a training's data: nothing is replayed on resume, and another number of ranks sees the same packs. Letters: `N`
samples of the data set, `n` samples that are packed.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import count, islice

import numpy as np
import numpy.typing as npt

from eyas.errors import ConfigError, DataError
from eyas.store.reader import Permutation

Pack = tuple[int, ...]
"""Indices of samples in the data set."""

WINDOW = 64
_EVALUATION_SEED = 0
_EPOCHS_KEPT = 2
"""At the end of an epoch the loader reads ahead in the next one."""


def form_packs(
    order: Iterable[int], token_counts: npt.NDArray[np.int32], *, pack_tokens: int, window: int = WINDOW
) -> list[Pack]:
    """Each sample of `order` in exactly one pack of at most `pack_tokens`; no sample may be longer than that.

    A pack takes, of the next `window` samples, the first one and then every one that still fits: none is passed over
    for longer than it takes to become the first. With `window` 1 it ends at the first sample that does not fit.
    """
    rest = iter(order)
    waiting = list(islice(rest, window))
    packs: list[Pack] = []
    while waiting:
        pack: list[int] = []
        room, at = pack_tokens, 0
        while at < len(waiting):
            num_tokens = int(token_counts[waiting[at]])
            if num_tokens <= room:
                pack.append(waiting.pop(at))
                waiting += islice(rest, 1)
                room -= num_tokens
            else:
                at += 1
        assert pack, "a sample longer than a pack"
        packs.append(tuple(pack))
    return packs


def require_fit(
    ids: npt.NDArray[np.uint8], token_counts: npt.NDArray[np.int32], indices: npt.NDArray[np.int64], pack_tokens: int
) -> None:
    """Raise ConfigError where a sample is longer than a pack."""
    num_tokens = token_counts[indices]
    too_long = int((num_tokens > pack_tokens).sum())
    if too_long:
        largest = indices[np.argmax(num_tokens)]
        raise ConfigError(
            f"train.pack_tokens: {pack_tokens} is too small for {too_long:,} of the {len(indices):,} samples; "
            f"the largest ({bytes(ids[largest]).hex()}) needs {token_counts[largest]}"
        )


def evaluation_packs(
    ids: npt.NDArray[np.uint8],
    token_counts: npt.NDArray[np.int32],
    held_out: npt.NDArray[np.int64],
    *,
    pack_tokens: int,
    window: int = WINDOW,
) -> list[Pack]:
    """Every held-out sample once, always in the same order, which is a random one: the first packs stand for all.

    `ids` `[N, 16]`, `token_counts` `[N]`, `held_out` `[n]`. Rank `r` of `R` takes `packs[r::R]`. Raises ConfigError
    where a sample is longer than a pack.
    """
    require_fit(ids, token_counts, held_out, pack_tokens)
    order = held_out[Permutation(ids[held_out], seed=_EVALUATION_SEED).indices()]
    return form_packs(order.tolist(), token_counts, pack_tokens=pack_tokens, window=window)


class Schedule:
    """Which packs each optimizer step takes, epoch after epoch without end.

    The order of an epoch is that of `store.reader.Permutation` among the samples to train on. A step takes
    `step_packs` packs, the last one of an epoch what is left; no step belongs to two epochs. For one thread.
    """

    def __init__(
        self,
        ids: npt.NDArray[np.uint8],
        token_counts: npt.NDArray[np.int32],
        train: npt.NDArray[np.int64],
        *,
        pack_tokens: int,
        step_packs: int,
        seed: int,
        window: int = WINDOW,
    ) -> None:
        """`ids` `[N, 16]`, `token_counts` `[N]`, `train` `[n]`: the indices of the samples to train on.

        Raises ConfigError where a sample is longer than a pack, DataError where there is none.
        """
        if step_packs < 1 or window < 1:
            raise ValueError(f"step_packs {step_packs} and window {window} must be at least 1")
        if not len(train):
            raise DataError("there is no captured sample to train on")
        require_fit(ids, token_counts, train, pack_tokens)
        self.pack_tokens = pack_tokens
        self.step_packs = step_packs
        self._seed, self._window = seed, window
        self._train, self._ids, self._token_counts = train, ids[train], token_counts
        self._packs: dict[int, list[Pack]] = {}
        self._starts = [0]
        """The first steps of the epochs that were looked at so far, and of the one behind them."""

    @property
    def num_steps_per_epoch(self) -> int:
        """Optimizer steps of the first epoch; others may have a few more or less, since they pack otherwise."""
        return self.num_steps(1)

    def num_steps(self, num_epochs: int) -> int:
        """Optimizer steps of the first `num_epochs` epochs together: the step at which the next one begins."""
        while len(self._starts) <= num_epochs:
            num_packs = len(self.packs(len(self._starts) - 1))
            self._starts.append(self._starts[-1] + -(-num_packs // self.step_packs))
        return self._starts[num_epochs]

    def packs(self, epoch: int) -> list[Pack]:
        """All packs of an epoch, in order."""
        found = self._packs.get(epoch)
        if found is None:
            order = self._train[Permutation(self._ids, seed=self._seed, epoch=epoch).indices()]
            found = form_packs(order.tolist(), self._token_counts, pack_tokens=self.pack_tokens, window=self._window)
            while len(self._packs) >= _EPOCHS_KEPT:
                self._packs.pop(next(iter(self._packs)))
            self._packs[epoch] = found
        return found

    def fill(self, epoch: int = 0) -> float:
        """Share of the epoch's packs that is tokens: 1 where every pack is full."""
        tokens = int(self._token_counts[self._train].sum(dtype=np.int64))
        return tokens / (len(self.packs(epoch)) * self.pack_tokens)

    def epoch_of(self, global_step: int) -> tuple[int, int]:
        """The epoch of a step, and its number within the epoch."""
        if global_step < 0:
            raise ValueError(f"step {global_step}")
        while self._starts[-1] <= global_step:
            self.num_steps(len(self._starts))
        epoch = bisect_right(self._starts, global_step) - 1
        return epoch, global_step - self._starts[epoch]

    def step(self, global_step: int) -> tuple[int, list[Pack]]:
        """The epoch of a step, and its packs for all ranks together."""
        epoch, number = self.epoch_of(global_step)
        return epoch, self.packs(epoch)[number * self.step_packs : (number + 1) * self.step_packs]

    def mine(self, global_step: int, *, rank: int, world: int) -> list[Pack]:
        """The packs of one rank: each `world`-th of the step; none where the step has fewer packs than ranks."""
        return self.step(global_step)[1][rank::world]

    def steps(self, start: int, stop: int | None = None, *, rank: int, world: int) -> Iterator[Sequence[Pack]]:
        """A rank's packs, step after step, as `Loader` takes them."""
        for global_step in count(start) if stop is None else range(start, stop):
            yield self.mine(global_step, rank=rank, world=world)
