"""Documents to batches: laid end to end and cut into sequences.

Every epoch visits all sequences once, in an order that depends on the seed alone. A batch is a pure function
of the number of samples that were consumed before it, so a run resumes from that one number and reads the
same data on any number of data-parallel ranks.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import torch


class Batch(NamedTuple):
    """Int64 tensors on the CPU, of shape [batch, sequence]; `labels` is `tokens` shifted by one position."""

    tokens: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    position_ids: torch.Tensor


class Split:
    """Documents of one part of the corpus, laid end to end and cut into samples of `seq_length + 1` tokens.

    Neighbouring samples share one token, so that each token is a label once.
    """

    def __init__(self, tokens: np.ndarray, documents: np.ndarray, *, seq_length: int, seed: int):
        """`documents` is int64 [n, 2]: index of the first token in `tokens`, number of tokens."""
        self._tokens, self._documents = tokens, documents
        self._ends = np.cumsum(documents[:, 1])
        self._seq_length, self._seed = seq_length, seed
        self._order = (-1, np.empty(0, np.int64))

    def __len__(self) -> int:
        """Number of samples in one epoch."""
        return max(0, (self.num_tokens - 1) // self._seq_length)

    @property
    def num_tokens(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def sample(self, index: int) -> np.ndarray:
        """Tokens of the sample at `index`, in the order of the documents: int64 [seq_length + 1]."""
        out = np.empty(self._seq_length + 1, np.int64)
        position, filled = index * self._seq_length, 0
        document = int(np.searchsorted(self._ends, position, side="right"))
        while filled < len(out):
            start, length = self._documents[document]
            inside = position + filled - (self._ends[document] - length)
            count = min(int(length - inside), len(out) - filled)
            out[filled : filled + count] = self._tokens[start + inside : start + inside + count]
            filled, document = filled + count, document + 1
        return out

    def batch(self, positions: Iterable[int]) -> Batch:
        """The samples at these positions of the endless shuffled sequence of epochs."""
        tokens = np.stack([self.sample(self._shuffled(p)) for p in positions])
        # torch would split these copies over threads, which wait for the threads of the machine's other ranks
        inputs, labels = np.ascontiguousarray(tokens[:, :-1]), np.ascontiguousarray(tokens[:, 1:])
        position_ids = np.tile(np.arange(self._seq_length), (len(inputs), 1))
        return Batch(*map(torch.from_numpy, (inputs, labels, np.ones_like(inputs), position_ids)))

    def micro_batches(
        self, consumed: int, *, global_batch_size: int, micro_batch_size: int, rank: int = 0, ranks: int = 1
    ) -> Iterator[Batch]:
        """This rank's share of the global batch that follows `consumed` samples.

        The global batch is the samples `consumed` to `consumed + global_batch_size`, whatever the number of
        ranks; sample i of it belongs to rank i % ranks.
        """
        mine = range(consumed + rank, consumed + global_batch_size, ranks)
        for first in range(0, len(mine), micro_batch_size):
            yield self.batch(mine[first : first + micro_batch_size])

    def _shuffled(self, position: int) -> int:
        epoch, place = divmod(position, len(self))
        if self._order[0] != epoch:
            order = np.arange(len(self), dtype=np.uint32 if len(self) < 2**32 else np.int64)
            np.random.default_rng([self._seed, epoch]).shuffle(order)
            self._order = (epoch, order)
        return int(self._order[1][place])


def hold_out(
    documents: np.ndarray, share: float, seed: int, seq_length: int
) -> tuple[np.ndarray, np.ndarray]:
    """Training and validation documents, each in the original order.

    In an order drawn from the seed, documents go to the validation part until it has its share of the tokens
    and at least one sequence. A lone document is cut in two instead.
    """
    lengths = documents[:, 1]
    total = int(lengths.sum())
    wanted = max(int(total * share), seq_length + 1)
    if len(documents) == 1:
        start, length = documents[0]
        kept = max(0, length - wanted)
        return np.array([[start, kept]]), np.array([[start + kept, length - kept]])

    order = np.random.default_rng(seed).permutation(len(documents))
    # a document that is most of the corpus would leave nothing to train on
    order = order[np.argsort(lengths[order] * 2 > total, kind="stable")]
    count = 1 + int(np.searchsorted(np.cumsum(lengths[order]), wanted))
    held = np.zeros(len(documents), bool)
    held[order[: min(count, len(documents) - 1)]] = True
    return documents[~held], documents[held]
