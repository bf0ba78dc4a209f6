"""Time kernels on one device: matrix products, attention and its backward, and copies, over sizes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch.nn import functional

from autopar.costs.calibrate.sample import ALONE, ATTENTION, LAUNCH, Sample

Tick = Callable[[int, int, str], None]

ENOUGH = 0.05
"""Seconds that the runs of one kernel take together, at least."""

CALLS, HELD = 64, 2**26
"""How many results are held at once, and how many bytes, of kernels whose results are not larger."""

LAUNCHED = 64
"""Elements of a copy that a GPU has made before the host has launched the next one."""

aten = torch.ops.aten


@dataclass(frozen=True)
class Kernels:
    """Sizes of what is timed.

    Attributes:
        products: batch, rows, columns and depth.
        attentions: batch, heads, positions and size of a head.
        copies: elements.
    """

    products: tuple[tuple[int, int, int, int], ...]
    attentions: tuple[tuple[int, int, int, int], ...]
    copies: tuple[int, ...]


SMALL = Kernels(
    (
        *((1, n, n, n) for n in (16, 64, 128, 256, 512, 1024)),
        *((1, 512, 512, depth) for depth in (8, 64, 2048)),
        *((1, rows, 1024, 256) for rows in (16, 32, 128)),
        *((1, 64, 2048, 512), (1, 1024, 32, 256), (1, 1000, 1000, 250)),
        *((16, 128, 128, 64), (64, 64, 64, 64)),
    ),
    ((1, 4, 128, 32), (2, 8, 256, 64)),
    tuple(4**i for i in range(3, 13)),
)
"""For a CPU: from what a launch takes to more than caches hold, and thin products, as those of microbatches are."""

ALONE_SIZES = ((1, 256, 256, 256), (1, 512, 512, 512))
"""Products that one process computes while the others do nothing."""

COLD = 2**25
"""Bytes of the operands that products of a CPU take by turns: weights come from memory where a step has used others."""

LARGE = Kernels(
    (
        *((1, n, n, n) for n in (256, 512, 1024, 2048, 4096, 8192)),
        *((1, 4096, 4096, depth) for depth in (64, 256, 1024)),
        *((1, 2048, 12288, 1536), (1, 4104, 4104, 1000), (1, 4096, 50257, 1024)),
        *((64, 1024, 1024, 128), (128, 2048, 2048, 64)),
    ),
    ((1, 16, 1024, 128), (4, 32, 2048, 128), (8, 16, 512, 64), (1, 8, 8192, 128)),
    tuple(4**i for i in range(3, 15)),
)
"""For a GPU: waves, depths that are short, sizes that are not aligned."""


def measure_kernels(
    device: torch.device,
    dtypes: Sequence[torch.dtype],
    chosen: Kernels | None = None,
    *,
    enough: float = ENOUGH,
    together: Callable[[float], float] = float,
    tick: Tick | None = None,
) -> list[Sample]:
    """Time every kernel in every dtype, with as many threads as torch uses now.

    Args:
        device: where.
        dtypes: in which.
        chosen: sizes; default: those for such a device.
        enough: seconds that the runs of each take together, at least.
        together: seconds of all processes from those of this one, where several measure at once.
        tick: called with ``(done, total, name)``.
    """
    chosen = chosen or (SMALL if device.type == "cpu" else LARGE)
    total = len(dtypes) * (len(chosen.products) + len(ATTENTION) * len(chosen.attentions)) + len(chosen.copies)
    total += device.type == "cuda"
    found: list[Sample] = []
    for kind, dtype, sizes, run in _kernels(device, dtypes, chosen):
        seconds = together(_seconds(run, enough, replayed=device.type == "cuda" and kind != LAUNCH))
        found.append(Sample(kind, str(dtype).removeprefix("torch."), sizes, seconds))
        if tick is not None:
            tick(len(found), total, str(found[-1]))
    return found


def _kernels(
    device: torch.device, dtypes: Sequence[torch.dtype], chosen: Kernels
) -> Iterator[tuple[str, torch.dtype, tuple[int, ...], Callable[[], torch.Tensor]]]:
    """Kind, dtype, sizes and a call of each kernel; its tensors live until the next one."""
    for dtype in dtypes:
        for batch, rows, columns, depth in chosen.products:
            # A batch of one is timed as aten.mm, which graphs have; bmm may run another kernel.
            shape = (batch,) if batch > 1 else ()
            a = torch.randn(*shape, rows, depth, device=device, dtype=dtype)
            other = partial(torch.randn, *shape, depth, columns, device=device, dtype=dtype)
            run = partial(_product, (aten.bmm if shape else aten.mm).default, a, _by_turns(other))
            yield "matmul", dtype, (batch, rows, columns, depth), run
        for batch, heads, positions, head in chosen.attentions:
            # As graphs have them: heads behind positions, in memory.
            made = torch.randn(4, batch, positions, heads, head, device=device, dtype=dtype).transpose(2, 3)
            q, k, v, grad = (t.requires_grad_() for t in made.unbind())
            for kind in ATTENTION:
                yield kind, dtype, (batch, heads, positions, head), partial(_attend, kind, q, k, v, grad)
    if device.type == "cuda":
        few = torch.randn(LAUNCHED, device=device)
        yield LAUNCH, torch.float32, (LAUNCHED,), partial(aten.clone.default, few)
    for count in chosen.copies:
        source = torch.randn(count, device=device)
        # Bytes: each float32 is read and written.
        yield "copy", torch.float32, (2 * 4 * count,), partial(aten.clone.default, source)


def _by_turns(made: Callable[[], torch.Tensor]) -> Iterator[torch.Tensor]:
    """One operand for ever, or on a CPU several of as many bytes as caches do not hold."""
    first = made()
    count = min(CALLS, COLD // first.nbytes) if first.device.type == "cpu" else 1
    return itertools.cycle([first, *(made() for _ in range(count - 1))])


def _product(multiply: Callable[..., torch.Tensor], a: torch.Tensor, others: Iterator[torch.Tensor]) -> torch.Tensor:
    return multiply(a, next(others))


def measure_alone(dtype: torch.dtype, enough: float, together: Callable[[float], float]) -> list[Sample]:
    """Time products of each process of the process group while the others wait; the mean of all, on a CPU.

    Args:
        dtype: of the products.
        enough: seconds of each, at least.
        together: seconds of all processes from those of this one.
    """
    found = []
    for sizes in ALONE_SIZES:
        _, rows, columns, depth = sizes
        a, made = torch.randn(rows, depth, dtype=dtype), partial(torch.randn, depth, columns, dtype=dtype)
        run, own = partial(_product, aten.mm.default, a, _by_turns(made)), 0.0
        for rank in range(dist.get_world_size()):
            dist.barrier()
            if rank == dist.get_rank():
                own = _seconds(run, enough, replayed=False)
        found.append(Sample(ALONE, str(dtype).removeprefix("torch."), sizes, together(own)))
    return found


def _attend(kind: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    made = functional.scaled_dot_product_attention(q, k, v, is_causal=kind != ATTENTION[0])
    return torch.autograd.grad(made, (q, k, v), grad)[0] if kind == ATTENTION[2] else made.detach()


def _seconds(run: Callable[[], torch.Tensor], enough: float, *, replayed: bool) -> float:
    """Mean seconds of a call; torch's timer waits for the device.

    The mean, since processes that share cores take turns of milliseconds: most calls see nothing of it, some wait long.
    As in a step, operators are called by their overloads, and what several return is held and then given back together:
    the memory that the next ones write to is new.

    Args:
        run: the call.
        enough: seconds that all of them take together, at least.
        replayed: calls are launched by a CUDA graph: a GPU waits for the host otherwise, whose time is another figure.
    """
    from torch.utils.benchmark import Timer  # half of what importing this package would take, and steps need none

    # As many results as fit into `HELD` bytes: more would measure the allocator at its limit.
    calls = max(1, min(CALLS, HELD // max(run().nbytes, 1)))
    statement = "[run() for _ in range(calls)]"
    if replayed:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            held = [run() for _ in range(calls)]  # noqa: F841
        statement = "graph.replay()"
    known = {"run": run, "calls": calls, "graph": graph if replayed else None}
    timer = Timer(statement, globals=known, num_threads=torch.get_num_threads())
    return float(timer.blocked_autorange(min_run_time=enough).mean) / calls
