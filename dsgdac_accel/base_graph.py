"""The base graph: rounds of disjoint pairs that average any number of workers exactly.

Source: Takezawa, Sato, Bao, Niwa and Yamada, "Beyond Exponential Graph: Communication-Efficient Topologies for
Decentralized Learning via Finite-time Convergence", NeurIPS 2023, with one peer per round (k = 1, "Base-2 graph").

The construction follows the binary digits of the number of workers:

1. A block of 2^p workers averages exactly in p rounds. In round j, each worker is paired with the worker whose position
   differs in bit j (a hypercube).
2. Any other number is a sum of powers of two, so it splits into blocks of different sizes, largest first. Each block
   first averages by itself. Then every worker after the first block is paired with a worker of that block, and both
   give each other the weight w = S / (S + T), with S the size of the block and T the number of workers after it. Both
   sides then have the mean of all workers. The block averages once more and is done. The workers after it have the
   right mean in total, and continue in the same way among themselves.
3. An even number is 2^a groups of an odd number q. The groups run step 2 in parallel, then a hypercube joins them.

For n = 2^a q, the period is a rounds if q = 1, and a + 2 floor(log2 q) + 1 rounds otherwise.
"""

from collections.abc import Iterable, Sequence
from itertools import chain, zip_longest

Exchange = tuple[int, int, float]
"""Two workers and the weight that each gives to the other."""

Exchanges = list[Exchange]
"""One round of disjoint pairs. A worker in no pair sits the round out."""


def base_graph_rounds(num_workers: int) -> list[Exchanges]:
    """Return the rounds that average `num_workers` >= 1 workers exactly, with at most one peer per worker and round.

    >>> base_graph_rounds(3)
    [[(0, 1, 0.5)], [(0, 2, 0.6666666666666666)], [(0, 1, 0.5)]]
    >>> [len(base_graph_rounds(n)) for n in (1, 2, 4, 5, 6, 7, 8)]
    [0, 1, 2, 5, 4, 5, 3]
    """
    odd = num_workers // (num_workers & -num_workers)  # n & -n is the largest power of two that divides n
    within = [_average_any(range(start, start + odd)) for start in range(0, num_workers, odd)]
    across = [hypercube(range(position, num_workers, odd)) for position in range(odd)]
    return _side_by_side(within) + _side_by_side(across)


def hypercube(workers: Sequence[int]) -> list[Exchanges]:
    """Return the log2(n) rounds that average n = 2^p workers exactly.

    >>> hypercube([0, 1, 2, 3])
    [[(0, 1, 0.5), (2, 3, 0.5)], [(0, 2, 0.5), (1, 3, 0.5)]]
    """
    size = len(workers)
    assert size & (size - 1) == 0, "the number of corners of a hypercube is a power of two"
    strides = [1 << bit for bit in range(size.bit_length() - 1)]
    return [[(workers[i], workers[i ^ s], 0.5) for i in range(size) if not i & s] for s in strides]


def _average_any(workers: Sequence[int]) -> list[Exchanges]:
    """Step 2 of the module docstring: average each block, then pass each block's surplus on, largest block first."""
    blocks = _binary_blocks(workers)
    passing_on: list[list[Exchanges]] = []
    for delay, block in enumerate(blocks[:-1]):
        rest = list(chain(*blocks[delay + 1 :]))
        share = len(block) / (len(block) + len(rest))
        pairs = [(inside, outside, share) for inside, outside in zip(block, rest, strict=False)]
        # Block `delay` is paired with an earlier block in each of the `delay` rounds before.
        passing_on.append([[]] * delay + [pairs, *hypercube(block)])
    return _side_by_side([hypercube(block) for block in blocks]) + _side_by_side(passing_on)


def _binary_blocks(workers: Sequence[int]) -> list[Sequence[int]]:
    """Split the workers into consecutive blocks, one per binary digit 1 of their number, largest first."""
    blocks: list[Sequence[int]] = []
    start = 0
    for bit in reversed(range(len(workers).bit_length())):
        if len(workers) >> bit & 1:
            blocks.append(workers[start : start + (1 << bit)])
            start += 1 << bit
    return blocks


def _side_by_side(schedules: Iterable[list[Exchanges]]) -> list[Exchanges]:
    """Run schedules of disjoint workers in parallel. A schedule that ends early sits out the remaining rounds."""
    return [list(chain(*exchanges)) for exchanges in zip_longest(*schedules, fillvalue=[])]
