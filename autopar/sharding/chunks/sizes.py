"""How a product beside which its own rows are communicated is best cut into chunks.

Rows come in equal units, and a chunk is a number of them. While chunk ``i`` is multiplied, chunk ``i + 1`` is gathered:

    seconds = sent(n_1) + sum over i of max(product(n_i), sent(n_(i+1))) + product(n_k)

A sum of what each chunk's product gives is sent beside the next product; it takes as long with the chunks in the
opposite order. Chunks need not be equal: small ones at the end that is exposed, large ones where tiles fill a device.
S. Wang et al., "Overlap Communication with Dependent Computation via Decomposition in Large Deep Learning Models",
ASPLOS 2023, cut the same products by devices.
"""

from __future__ import annotations

from collections.abc import Sequence


def best_chunks(
    sent: Sequence[float], product: Sequence[float], beside: float = 0.0, occupies: float = 0.0
) -> tuple[float, tuple[int, ...]]:
    """The fewest seconds, and how many units each chunk has; one chunk overlaps with nothing.

    Args:
        sent: seconds to communicate 1, 2, ... units, up to all of them.
        product: seconds to multiply as many.
        beside: seconds of other kernels that run while the first chunk is gathered, or the last one reduced.
        occupies: share of what is sent by which kernels beside it take longer, see `autopar.costs.device.Link`.

    >>> best_chunks([1, 2, 3, 4], [1, 2, 3, 4])
    (5.0, (1, 1, 1, 1))
    >>> best_chunks([9, 18], [1, 2], beside=18)
    (2.0, (2,))
    """
    units = len(sent)
    # By units that have been gathered and by units of the last chunk: when its product starts, and the chunks.
    starts: dict[tuple[int, int], tuple[float, tuple[int, ...]]] = {
        (n, n): (exposed(sent[n - 1], beside, occupies), (n,)) for n in range(1, units + 1)
    }
    for done in range(1, units):
        for last in range(1, done + 1):
            if (done, last) not in starts:
                continue
            begun, chunks = starts[done, last]
            for more in range(1, units - done + 1):
                then = begun + product[last - 1] + exposed(sent[more - 1], product[last - 1], occupies)
                key = (done + more, more)
                if key not in starts or then < starts[key][0]:
                    starts[key] = then, (*chunks, more)
    ends = [(starts[units, n][0] + product[n - 1], starts[units, n][1]) for n in range(1, units + 1)]
    seconds, chunks = min(ends, key=lambda end: (end[0], len(end[1])))
    return float(seconds), chunks


def exposed(sent: float, beside: float, occupies: float) -> float:
    """Seconds by which a collective is longer than the kernels beside it, or by which it makes them longer."""
    return max(sent - beside, occupies * sent)
