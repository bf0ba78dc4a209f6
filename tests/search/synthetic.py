"""A transformer-like layout problem: forward and backward graph of einsums on a two-axis mesh."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import numpy as np

from autopar.search.solver.problem import Edge, Node, Problem

SIZES = {"b": 64, "s": 4096, "t": 4096, "d": 4096, "h": 32, "e": 128, "f": 14336, "v": 128256}
MESH = (32, 8)
BANDWIDTH = (5e10, 3e11)  # bytes per second, per axis
LATENCY = (2e-5, 5e-6)
FLOPS, HBM = 4e14, 2.5e12
REPLICATE, PARTIAL = -1, -2
STATE_BYTES = 16  # parameter, gradient and two Adam moments, per element

Layout = tuple[int, ...]  # one placement (dim, REPLICATE or PARTIAL) per mesh axis


@dataclass(frozen=True)
class Op:
    """One einsum-like op and its per-axis strategies."""

    name: str
    inputs: tuple[tuple[int, str], ...]
    output: str
    linear: bool = False
    blocked: str = ""  # factors that may not be sharded
    parameter: bool = False


@dataclass
class Tape:
    """Ops in order, plus edges that close the ring of a quotient graph."""

    ops: list[Op] = field(default_factory=list)
    extra: list[tuple[int, int, int]] = field(default_factory=list)  # producer, consumer, operand

    def add(self, name: str, inputs: list[tuple[int, str]], output: str, **kw: object) -> int:
        """Append an op and return its index."""
        self.ops.append(Op(f"{name}_{len(self.ops)}", tuple(inputs), output, **kw))  # type: ignore[arg-type]
        return len(self.ops) - 1


def volume(dims: str) -> float:
    """Elements of a tensor with these dims."""
    return float(np.prod([SIZES[c] for c in dims])) if dims else 1.0


def axis_strategies(op: Op) -> list[tuple[str, tuple[int, ...], int]]:
    """Per-axis strategies: sharded factor, placement of each input, placement of the output."""
    found = [("", (REPLICATE,) * len(op.inputs), REPLICATE)]
    for c in dict.fromkeys("".join(d for _, d in op.inputs) + op.output):
        if c in op.blocked or (c not in op.output and not op.linear):
            continue
        out = op.output.index(c) if c in op.output else PARTIAL
        found.append((c, tuple(d.index(c) if c in d else REPLICATE for _, d in op.inputs), out))
    if op.linear and not op.parameter:
        for i in range(len(op.inputs)):
            ins = tuple(PARTIAL if j == i else REPLICATE for j in range(len(op.inputs)))
            found.append(("", ins, PARTIAL))
    return found


def redistribute(src: Layout, dst: Layout, elements: float) -> float:
    """Seconds to change a layout, axis by axis; inf if it would create a partial sum."""
    total = 0.0
    for axis, (a, b) in enumerate(zip(src, dst, strict=True)):
        if a == b:
            continue
        if b == PARTIAL:
            return float("inf")
        if a == REPLICATE:
            continue
        shards = np.prod([MESH[o] for o in range(len(MESH)) if o != axis and src[o] >= 0], initial=1.0)
        local, p = 2 * elements / shards, MESH[axis]
        factor = {(True, True): 2.0, (True, False): 1.0, (False, True): 1.0, (False, False): 1.0 / p}[
            (a == PARTIAL, b == REPLICATE)
        ]
        total += LATENCY[axis] + factor * local * (p - 1) / p / BANDWIDTH[axis]
    return total


def transformer(layers: int, ring: bool, converts: int) -> Tape:
    """Forward and backward ops of a decoder; `converts` elementwise casts follow every activation."""
    tape = Tape()
    saved: list[tuple[int, str]] = []  # (op, kind) to differentiate, in order
    grads: dict[int, list[tuple[int, str]]] = {}

    def cast(x: int, dims: str) -> int:
        for _ in range(converts):
            y = tape.add("convert", [(x, dims)], dims, linear=True)
            saved.append((y, "einsum"))
            x = y
        return x

    def op(name: str, inputs: list[tuple[int, str]], output: str, linear: bool = True, blocked: str = "") -> int:
        y = tape.add(name, inputs, output, linear=linear, blocked=blocked)
        saved.append((y, "einsum"))
        return cast(y, output)

    def weight(name: str, dims: str) -> int:
        return tape.add(name, [], dims, parameter=True)

    def norm(x: int) -> int:
        r = op("rms", [(x, "bsd")], "bs", linear=False, blocked="d")
        n = op("scale", [(x, "bsd"), (r, "bs")], "bsd", linear=False)
        return op("gain", [(n, "bsd"), (weight("w_norm", "d"), "d")], "bsd", linear=False)

    x = op("embed", [(weight("w_embed", "vd"), "vd")], "bsd", blocked="")
    first, last = [], x
    for _ in range(layers):
        start = len(tape.ops)
        n = norm(x)
        q, k, v = (op(f"{c}_proj", [(n, "bsd"), (weight(f"w_{c}", "dhe"), "dhe")], "bshe") for c in "qkv")
        q, k = op("rope", [(q, "bshe")], "bshe", linear=False), op("rope", [(k, "bshe")], "bshe", linear=False)
        a = op("sdpa", [(q, "bshe"), (k, "bthe"), (v, "bthe")], "bshe", linear=False, blocked="ste")
        o = op("o_proj", [(a, "bshe"), (weight("w_o", "hed"), "hed")], "bsd")
        y = op("add", [(x, "bsd"), (o, "bsd")], "bsd", linear=False)
        n = norm(y)
        g, u = (op(f"{c}_proj", [(n, "bsd"), (weight(f"w_{c}", "df"), "df")], "bsf") for c in ("gate", "up"))
        m = op("swiglu", [(op("silu", [(g, "bsf")], "bsf", linear=False), "bsf"), (u, "bsf")], "bsf", linear=False)
        z = op("down_proj", [(m, "bsf"), (weight("w_down", "fd"), "fd")], "bsd")
        if not first:
            first = [(i, j) for i in range(start, len(tape.ops)) for j, p in enumerate(tape.ops[i].inputs) if p[0] == x]
            first += [(len(tape.ops), 0)] if tape.ops[start].inputs and y < start else []
        x = last = op("add", [(y, "bsd"), (z, "bsd")], "bsd", linear=False)
    logits = op("head", [(norm(x), "bsd"), (weight("w_head", "dv"), "dv")], "bsv")
    loss = op("loss", [(logits, "bsv")], "bs", linear=False, blocked="v")
    grads[loss] = [(loss, "bs")]
    backward(tape, saved, grads)
    if ring and first:
        tape.extra += [(last, c, j) for c, j in first]
    return tape


def backward(tape: Tape, saved: list[tuple[int, str]], grads: dict[int, list[tuple[int, str]]]) -> None:
    """Append one gradient op per operand, newest op first, with accumulation adds."""
    for y, _ in reversed(saved):
        node, terms = tape.ops[y], grads.get(y, [])
        if not terms:
            continue
        dy = terms[0][0]
        for other, _ in terms[1:]:
            dy = tape.add("accumulate", [(dy, node.output), (other, node.output)], node.output, linear=False)
        for i, (x, dims) in enumerate(node.inputs):
            rest = [p for j, p in enumerate(node.inputs) if j != i]
            own = [] if node.linear else [(x, dims)]
            g = tape.add(
                f"d_{node.name}",
                [(dy, node.output), *rest, *own],
                dims,
                linear=node.linear or dims == "d",
                blocked=node.blocked,
            )
            grads.setdefault(x, []).append((g, dims))
    for p, node in enumerate(tape.ops[: len(tape.ops)]):
        if node.parameter and p in grads:
            tape.extra.append((grads[p][0][0], p, -1))


def to_problem(tape: Tape) -> Problem:
    """Labels are pairs of per-axis strategies; edges price redistribution between grouped layouts."""
    labels = [list(itertools.product(axis_strategies(op), repeat=len(MESH))) for op in tape.ops]
    nodes = tuple(make_node(op, ls) for op, ls in zip(tape.ops, labels, strict=True))
    wires = [(p, c, j) for c, op in enumerate(tape.ops) for j, (p, _) in enumerate(op.inputs)] + tape.extra
    edges = []
    for p, c, j in wires:
        out = [tuple(s[2] for s in ls) for ls in labels[p]]
        need = [tuple(s[2] if j < 0 else s[1][j] for s in ls) for ls in labels[c]]
        rows, cols = sorted(set(out)), sorted(set(need))
        size = volume(tape.ops[p].output)
        table = np.array([[redistribute(a, b, size) for b in cols] for a in rows])
        edges.append(Edge(p, c, np.array([rows.index(o) for o in out]), np.array([cols.index(o) for o in need]), table))
    return Problem(nodes, tuple(edges))


def make_node(op: Op, labels: list[tuple[tuple[str, tuple[int, ...], int], ...]]) -> Node:
    """Roofline compute, and memory for parameters."""
    dims = "".join(dict.fromkeys("".join(d for _, d in op.inputs) + op.output))
    flops, moved = 2 * volume(dims), 2 * sum(volume(d) for d in [*(d for _, d in op.inputs), op.output])
    shards = np.array([np.prod([MESH[a] for a, s in enumerate(ls) if s[0]], initial=1.0) for ls in labels])
    seconds = np.maximum(flops / FLOPS, moved / HBM) / shards
    if not op.parameter:
        return Node(op.name, seconds, np.zeros(len(labels)))
    state = STATE_BYTES * volume(op.output) / shards
    return Node(op.name, np.zeros(len(labels)), state)


def synthetic_problem(layers: int = 2, ring: bool = True, converts: int = 2) -> Problem:
    """The default has about 350 nodes, as the quotient graph of a real decoder does."""
    return to_problem(transformer(layers, ring, converts))
