"""Into which chunks a product and the collective of its rows are cut, by the cost model."""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from autopar.costs.kernels import kernel_seconds, stream
from autopar.ir.node_info import info
from autopar.ir.ops.collectives import Collective
from autopar.sharding.chunks.products import rate_of, rows_work
from autopar.sharding.chunks.sites import GATHER, REDUCE, Site
from autopar.sharding.chunks.sizes import best_chunks, exposed
from autopar.sharding.node_seconds import NodeSeconds
from autopar.sharding.redistribute.move_seconds import MOST_UNITS

LEAST_GAIN = 0.05
"""Of a collective's seconds, this share has to be hidden by chunks: less is within the error of the cost model."""


def chunks_of(site: Site, seconds: NodeSeconds) -> tuple[float, tuple[int, ...]]:
    """Seconds that chunks save, and the units of each; a single one where that is too little."""
    made = collective_of(site.collective)
    added = [site.added[0]] if site.added is not None else []
    whole = sum(seconds.kernel(n)[0] for n in (*site.products, *added))
    # What a chunk does not need: exchanges and copies that bring the dim that is split to the front, and back.
    beyond = sum(
        seconds.collective(c) if (c := info(n).collective) is not None else seconds.kernel(n)[0]
        for n in site.moved if n is not site.collective
    )  # fmt: skip
    beside = _beside(site, seconds)
    occupies = seconds.machine.links[seconds.machine.names.index(made.axis)].occupies
    before = exposed(seconds.collective(made), beside, occupies) + whole + beyond
    if site.units > MOST_UNITS:
        return 0.0, (site.units,)
    device = seconds.machine.device
    counts = range(1, site.units + 1)
    if site.kind == REDUCE:
        sent = [seconds.collective(part_of(made, n, site.units)) for n in counts]
    else:
        sent = [n * seconds.collective(part_of(made, 1, site.units)) for n in counts]
    messages = 1 if site.kind == REDUCE else site.units
    multiplied = [
        # The host has to launch what a chunk consists of.
        max(_product_seconds(site, n, seconds), device.host * (len(site.products) + n * messages / site.units))
        for n in counts
    ]
    after, chunks = best_chunks(sent, multiplied, beside, occupies)
    if before - after < LEAST_GAIN * seconds.collective(made):
        return 0.0, (site.units,)
    return before - after, chunks if site.kind == GATHER else chunks[::-1]


def _beside(site: Site, seconds: NodeSeconds) -> float:
    """Seconds of the kernels that run between a collective and its wait."""
    found, node = 0.0, site.collective.next
    while node is not site.wait:
        if info(node).collective is None:
            found += seconds.kernel(node)[0]
        node = node.next
    return found


def _product_seconds(site: Site, units: int, seconds: NodeSeconds) -> float:
    """Of the products of so many units of rows."""
    rows, found = units * site.rows // site.units, 0.0
    for node in site.products:
        value, given = node.meta["val"], node.all_input_nodes[0].meta["val"]
        rate = rate_of(node, seconds.machine.device)
        work = rows_work(rows, given, value.shape[1], value.dtype)
        found += float(kernel_seconds(work, rate, seconds.machine.device)[0])
        if site.added is not None:
            work = stream(3 * rows * value.shape[1] * value.element_size())
            found += float(kernel_seconds(work, rate, seconds.machine.device)[0])
    return found


def collective_of(node: fx.Node) -> Collective:
    """What a collective does."""
    made = info(node).collective
    assert made is not None
    return made


def part_of(made: Collective, units: int, of: int) -> Collective:
    """The collective of some of its units."""
    return replace(made, bytes=made.bytes * units / of)
