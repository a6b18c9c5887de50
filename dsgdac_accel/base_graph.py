"""The base graph: rounds of pairs that average any number of workers exactly.

Source: Takezawa, Sato, Bao, Niwa and Yamada, "Beyond Exponential Graph: Communication-Efficient Topologies for
Decentralized Learning via Finite-time Convergence", NeurIPS 2023, with one peer per round (k = 1, "Base-2 graph").

The idea, on the binary digits of the number of workers:

1. A block of 2^p workers averages exactly in p rounds: in round j each meets the worker whose position differs in
   bit j (a hypercube).
2. Any other number is a sum of powers of two, so it splits into blocks of different sizes, largest first. Each block
   first averages by itself. Then every worker after the first block meets one of that block, and the two exchange the
   fraction w = S / (S + T), with S the size of the block and T the number of workers after it. That moves exactly the
   surplus of the block: both sides now have the mean of everyone. The block averages once more and is done, while the
   workers after it, already with the right mean in total, go on in the same way among themselves.
3. An even number is 2^a groups of an odd number q: the groups run step 2 side by side, then a hypercube joins them.

For n = 2^a q the period is a rounds for q = 1 and a + 2 floor(log2 q) + 1 otherwise.
"""

from collections.abc import Iterable, Sequence
from itertools import chain, zip_longest

Exchange = tuple[int, int, float]
"""Two workers and the weight that each gives the other."""

Exchanges = list[Exchange]
"""One round: exchanges of disjoint pairs. A worker in none of them sits the round out."""


def base_graph_rounds(num_workers: int) -> list[Exchanges]:
    """The rounds that average `num_workers` >= 1 workers exactly; each worker meets at most one other in a round.

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
    """The log2 rounds that average a power of two of workers exactly.

    >>> hypercube([0, 1, 2, 3])
    [[(0, 1, 0.5), (2, 3, 0.5)], [(0, 2, 0.5), (1, 3, 0.5)]]
    """
    size = len(workers)
    assert size & (size - 1) == 0, "a hypercube has a power of two of corners"
    strides = [1 << bit for bit in range(size.bit_length() - 1)]
    return [[(workers[i], workers[i ^ s], 0.5) for i in range(size) if not i & s] for s in strides]


def _average_any(workers: Sequence[int]) -> list[Exchanges]:
    """Step 2 of the idea above: average each block, then let the blocks pass on their surplus, largest first."""
    blocks = _binary_blocks(workers)
    passing_on: list[list[Exchanges]] = []
    for delay, block in enumerate(blocks[:-1]):
        rest = list(chain(*blocks[delay + 1 :]))
        share = len(block) / (len(block) + len(rest))
        meeting = [(inside, outside, share) for inside, outside in zip(block, rest, strict=False)]
        # Block number `delay` meets an earlier block in every round before this one, and is free from here on.
        passing_on.append([[]] * delay + [meeting, *hypercube(block)])
    return _side_by_side([hypercube(block) for block in blocks]) + _side_by_side(passing_on)


def _binary_blocks(workers: Sequence[int]) -> list[Sequence[int]]:
    """Split into consecutive blocks whose sizes are the binary digits of the number of workers, largest first."""
    blocks: list[Sequence[int]] = []
    start = 0
    for bit in reversed(range(len(workers).bit_length())):
        if len(workers) >> bit & 1:
            blocks.append(workers[start : start + (1 << bit)])
            start += 1 << bit
    return blocks


def _side_by_side(schedules: Iterable[list[Exchanges]]) -> list[Exchanges]:
    """Run schedules of disjoint workers at the same time; one that ends early sits out the rest."""
    return [list(chain(*exchanges)) for exchanges in zip_longest(*schedules, fillvalue=[])]
