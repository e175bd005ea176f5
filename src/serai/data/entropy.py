"""What a model without context could reach: the yardstick beside every first validation loss."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["unigram_entropy"]


def unigram_entropy(train: NDArray[np.int64], validation: NDArray[np.int64]) -> float:
    """Nats per validation token under the training split's token frequencies.

    ``-Σ_v n_v / N · ln((m_v + 1) / (M + V))`` with ``n`` the validation counts (``N`` in all), ``m`` the
    training counts (``M`` in all), ``V`` the vocabulary, and one added to each count so that a token never
    seen in training has a finite cost. Strictly this is the cross-entropy of the unigram model.

    Args:
        train: count of each token in the training split, ``[vocab] int64``.
        validation: the same of the validation split, not empty.
    """
    probabilities = (train + 1.0) / (train.sum() + len(train))
    return float(-(validation / validation.sum()) @ np.log(probabilities))
