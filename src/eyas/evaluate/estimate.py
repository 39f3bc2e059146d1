"""Acceptance length with its interval, however it was measured."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from eyas.train.metrics import CONFIDENCE, NUM_RESAMPLES, Estimate


def length_estimate(terms: npt.NDArray[np.float64], *, pooled: bool) -> Estimate | None:
    """`1 + accepted / verifications` from `[N, 2]`, with its bootstrap interval over requests."""
    count = len(terms)
    if not count:
        return None

    def statistic(weights: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:  # [resamples, N]
        if pooled:
            sums = weights @ terms
            return np.asarray(1 + sums[:, 0] / sums[:, 1])
        return np.asarray(1 + weights @ (terms[:, 0] / terms[:, 1]) / count)

    value = float(statistic(np.ones((1, count)))[0])
    if count < 2:
        return Estimate(value)
    drawn = np.random.default_rng(0).multinomial(count, np.full(count, 1 / count), NUM_RESAMPLES)
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(statistic(drawn.astype(np.float64)), [tail, 1 - tail])
    return Estimate(value, float(low), float(high))
