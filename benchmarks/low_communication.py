"""Workers that train apart: what they send across a slow link, how fast they are, and what their loss is.

Four Gloo processes are two workers of two devices, in a network namespace each, and the link between the namespaces
carries so many Mbit/s, and takes so many milliseconds (root and iproute2 needed; skipped without). A language model is
trained synchronously (hsdp: gradients go across the link in every step), with parameters sharded over all devices
(fsdp), whole and in few bits, with DiLoCo and streaming DiLoCo of 50 local steps, with compressed gradients, and
without any exchange; they take turns, and the fastest round of each counts. Bytes are those that the interface of the
first namespace has sent; what `CompressedGradients.predicted`, or the plan, says is beside them.

With ``--loss``, in one process: the loss of a tiny language model over the bytes of this repository's text, against
the tokens it has seen, synchronously, with four workers that train apart, with four that compress their gradients, and
with four devices that quantize what they gather and reduce, and with four workers of random paces whose gradients are
stale, for three seeds; and what each sends in all, by the closed forms.

With ``--paces``: steps per second of four Gloo processes that sleep for a step, each longer in its turn or one of them
always, with stale gradients, beside what the simulator says.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from predicted_time import member, run, shaped  # noqa: E402

EVERY = 50
SYNCHRONOUS, ALONE = "synchronous", "no exchange"
APART: dict[str, dict[str, Any]] = {
    "DiLoCo": {"every": EVERY},
    "streaming": {"every": EVERY, "fragments": 4, "delay": 5},
    "streaming, 4 bits": {"every": EVERY, "fragments": 4, "delay": 5, "bits": 4},
}
COMPRESSED: dict[str, dict[str, Any]] = {
    "PowerSGD, rank 2": {"method": "powersgd", "rank": 2},
    "top-k, 1%": {"method": "topk", "share": 0.01},
    "1-bit Adam": {"method": "onebit", "freeze": 2},
    "0/1 Adam": {"method": "zeroone", "freeze": 2},
    "0/1 Adam, 1 step of 4": {"method": "zeroone", "freeze": 2, "local": 8, "longest": 4},
}
WARM = {"0/1 Adam, 1 step of 4": 18}
"""Steps before the measured ones, where these are more than two: until exchanges are as seldom as they will be."""

QUANTIZED: dict[str, dict[str, int]] = {
    "fsdp": {},
    "fsdp, weights in 8 bits": {"weights": 8},
    "fsdp, 8 and 4 bits": {"weights": 8, "gradients": 4},
}
WORDS, WIDTH, BLOCKS, LENGTH, ROWS = 256, 64, 4, 64, 32
WORKERS, SEEDS, STEPS, LOSSES, ROUND = 4, 3, 300, 100, 20
EXCHANGING: dict[str, float] = {}
"""Seconds that this process has spent in exchanges, waiting for the other worker included."""

PREDICTED: dict[str, list[float]] = {}
"""Bytes that a worker is predicted to send in each step."""

CURVES: dict[str, dict[str, Any] | None] = {
    SYNCHRONOUS: None,
    "local SGD": {"every": ROUND, "outer_lr": 1.0, "outer_momentum": 0.0},
    "DiLoCo": {"every": ROUND},
    "streaming": {"every": ROUND, "fragments": 4, "delay": 2, "mix": 0.5},
    "streaming, 4 bits": {"every": ROUND, "fragments": 4, "delay": 2, "mix": 0.5, "bits": 4},
    **COMPRESSED,
    "1-bit Adam": {"method": "onebit", "freeze": 60},
    "0/1 Adam": {"method": "zeroone", "freeze": 60},
    "0/1 Adam, 1 step of 4": {"method": "zeroone", "freeze": 60, "local": 30, "longest": 4},
    **{name: bits for name, bits in QUANTIZED.items() if bits},
    "fsdp, 4 and 4 bits": {"weights": 4, "gradients": 4},
    "asynchronous": {"staleness": 4},
    "asynchronous, compensated": {"staleness": 4, "compensation": 0.1},
}
PACES: dict[str, list[list[float]]] = {
    "each in its turn 4 times as long": [[0.16 if i == w else 0.04 for i in range(4)] for w in range(4)],
    "one always 4 times as long": [[0.16 if w == 3 else 0.04] for w in range(4)],
}
"""Seconds of each worker's successive steps."""

STALENESSES, PACED = (0, 1, 4), 24


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rate", type=float, default=50.0, metavar="MBIT", help="Mbit/s of the link (default: 50)")
    parser.add_argument(
        "--delay", type=float, default=0.0, metavar="MS", help="for which a message and its answer take longer"
    )
    parser.add_argument("--rounds", type=int, default=3, help="measured rounds (default: 3)")
    parser.add_argument("--loss", action="store_true", help="loss against tokens, in one process")
    parser.add_argument("--paces", action="store_true", help="steps per second with stale gradients")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these ways of training")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"of --loss, in hundreds (default: {STEPS})")
    parser.add_argument("--seeds", type=int, default=SEEDS, help=f"of --loss (default: {SEEDS})")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--work", metavar="FOLDER", help=argparse.SUPPRESS)  # one of the processes
    options = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "AUTOPAR_CACHE": "0"}
    if options.work and options.paces:
        paced(Path(options.work))
        return
    if options.paces:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "plans.json").write_text("[]")
            run([__file__, "--work", folder, "--paces"], [[]] * 4, 600.0)
            rates = json.loads((Path(folder) / "rows.json").read_text())
            print(json.dumps(rates, indent=1) if options.json else "\n".join(map(rate_row, rates)))
        return
    if options.work:
        every = [SYNCHRONOUS, ALONE, *QUANTIZED, *APART, *COMPRESSED]
        work(Path(options.work), options.rounds, options.only or every)
        return
    if options.loss:
        curves = losses(options.only or list(CURVES), options.steps, options.seeds)
        print(json.dumps(curves, indent=1) if options.json else curve_table(curves))
        return
    if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")):
        print("skipped: a slow link needs root and iproute2 (ip, tc)")
        return
    with tempfile.TemporaryDirectory() as folder, shaped(options.rate, options.delay) as prefixes:
        (Path(folder) / "plans.json").write_text("[]")
        only = ["--only", *options.only] if options.only else []
        run([__file__, "--work", folder, "--rounds", str(options.rounds), *only], prefixes, 1200.0)
        rows = json.loads((Path(folder) / "rows.json").read_text())
        print(json.dumps(rows, indent=1) if options.json else table(rows))


def work(folder: Path, rounds: int, names: list[str]) -> None:
    """One process: a round of each in turn."""
    import torch
    import torch.distributed as dist

    with member(folder) as (mesh, rows):
        runs = {name: trainer(mesh, name) for name in names}
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        sent: dict[str, list[float]] = {name: [] for name in runs}
        exchanging: dict[str, list[float]] = {name: [] for name in runs}
        for turn in range(-1, rounds):  # the first warms
            for name, step in runs.items():
                count = 12 if name == SYNCHRONOUS or name in (*COMPRESSED, *QUANTIZED) else EVERY
                count = count if turn >= 0 else WARM.get(name, 2)
                dist.barrier()
                before, earlier, start = bytes_sent(), EXCHANGING.get(name, 0.0), time.perf_counter()
                for _ in range(count):
                    step()
                taken = torch.tensor(time.perf_counter() - start)
                dist.all_reduce(taken, op=dist.ReduceOp.MAX)
                if turn < 0:
                    PREDICTED[name] = []
                if turn >= 0:
                    seconds[name].append(float(taken) / count)
                    sent[name].append((bytes_sent() - before) / count)
                    exchanging[name].append((EXCHANGING.get(name, 0.0) - earlier) / count)
        rows += [
            {
                "training": n, "seconds": min(seconds[n]), "bytes": statistics.median(sent[n]),
                "exchanging": min(exchanging[n]), "predicted": statistics.mean(PREDICTED[n]) if PREDICTED[n] else None,
            }
            for n in runs
        ]  # fmt: skip


def paced(folder: Path) -> None:
    """One process: steps of all workers in a second, for each way to be slow and each staleness."""
    import torch
    import torch.distributed as dist

    import autopar
    from autopar.costs.cluster import Link
    from autopar.simulate.stale_workers import Run

    with member(folder) as (_, rows):
        search = autopar.Search(roles={"all": "stale"}, inexact=("stale",))
        mesh = dist.device_mesh.init_device_mesh("cpu", (WORKERS,), mesh_dim_names=("all",))
        rank = dist.get_rank()
        for name, seconds in PACES.items():
            for staleness in STALENESSES:
                linear = torch.nn.Linear(8, 1)
                torch.nn.init.zeros_(linear.weight)
                torch.nn.init.zeros_(linear.bias)
                model = autopar.parallelize(
                    linear, mesh, (torch.ones(4, 8),), search=search, inputs="local", loss_fn=mean
                )
                optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
                stale = autopar.StaleGradients(model, optimizer, staleness=staleness)
                model(torch.ones(1, 8)).backward()
                optimizer.step()  # warms
                stale.synchronize()
                start = time.perf_counter()
                for step in range(PACED):
                    time.sleep(seconds[rank][step % len(seconds[rank])])
                    optimizer.step()
                stale.synchronize()
                taken = time.perf_counter() - start
                stale.detach()
                link = Link("loopback", bandwidth=1e9, latency=1e-4)
                expected = Run(seconds, 36, link, staleness, WORKERS).run(PACED)
                rows.append(
                    {
                        "paces": name, "staleness": staleness, "measured": WORKERS * PACED / taken,
                        "predicted": WORKERS * PACED / expected,
                    }
                )  # fmt: skip


def mean(output: Any, batch: Any) -> Any:
    """A loss."""
    return output.mean()


def rate_row(row: dict[str, Any]) -> str:
    """Steps per second."""
    rates = f"{row['predicted']:6.1f} predicted {row['measured']:6.1f} measured steps/s"
    return f"{row['paces']:<34} staleness {row['staleness']} {rates}"


def trainer(mesh: Any, name: str) -> Callable[[], None]:
    """A step of training."""
    import autopar

    outer, inner = mesh.mesh_dim_names
    role = "compressed" if name in COMPRESSED else "local"
    apart = autopar.Search(roles={outer: role, inner: "shard"}, inexact=(role,))
    search = autopar.Search(recipe="hsdp") if name == SYNCHRONOUS else apart
    if name in QUANTIZED:
        bits = {outer: QUANTIZED[name]} if QUANTIZED[name] else {}
        search = autopar.Search(recipe="fsdp", quantized=bits, inexact=("quantized",))
    model = autopar.parallelize(language_model(0), mesh, batch_of(0), search=search)
    optimizer = optimizer_of(name, model.parameters(), 1e-3)
    compressed = autopar.CompressedGradients(model, optimizer, **COMPRESSED[name]) if name in COMPRESSED else None
    if name in APART:
        # Hooks run in the order in which they are registered: these are around the exchange.
        began = [0.0]
        optimizer.register_step_post_hook(lambda *_: began.__setitem__(0, time.perf_counter()))
        autopar.LocalSteps(model, optimizer, **APART[name])
        optimizer.register_step_post_hook(
            lambda *_: EXCHANGING.__setitem__(name, EXCHANGING.get(name, 0.0) + time.perf_counter() - began[0])
        )
    done = 0

    def step() -> None:
        nonlocal done
        predicted = PREDICTED.setdefault(name, [])
        optimizer.zero_grad()
        model(**batch_of(done)).backward()
        if compressed is not None:
            # Of both devices of the worker, of whose shards the second's are as large.
            predicted.append(2 * compressed.predicted.sent_bytes)
        optimizer.step()
        done += 1
        if name in QUANTIZED:
            predicted.append(2 * model.plan.predicted.communication_bytes[outer])

    return step


def optimizer_of(name: str, parameters: Any, lr: float) -> Any:
    """AdamW, but for 1-bit and 0/1 Adam."""
    import torch

    kind = torch.optim.Adam if name.startswith(("1-bit", "0/1")) else torch.optim.AdamW
    return kind(parameters, lr=lr)


def bytes_sent() -> int:
    """By the interface to the other namespace, all processes together."""
    name = os.environ["GLOO_SOCKET_IFNAME"]
    return int(Path(f"/sys/class/net/{name}/statistics/tx_bytes").read_text())


def language_model(seed: int, width: int = WIDTH, blocks: int = BLOCKS) -> Any:
    """A language model over bytes, which returns its loss."""
    import torch
    from torch import nn
    from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(self.norms[0](x)).chunk(3, -1))
            x = x + self.out(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
            return x + self.down(gelu(self.up(self.norms[1](x))))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.places = nn.Embedding(WORDS, width), nn.Embedding(LENGTH, width)
            self.layers = nn.ModuleList(Block() for _ in range(blocks))
            self.head = nn.Linear(width, WORDS)

        def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            x = self.words(tokens) + self.places.weight
            for layer in self.layers:
                x = layer(x)
            return cross_entropy(self.head(x).flatten(0, 1), labels.flatten())

    torch.manual_seed(seed)
    return Model()


def batch_of(number: int, rows: int = ROWS, seed: int = 0, validation: bool = False) -> dict[str, Any]:
    """Lines of bytes of this repository's text, and the bytes after them; the last tenth is for validation."""
    import torch

    text = _text()
    cut = len(text) * 9 // 10
    part = text[cut:] if validation else text[:cut]
    generator = torch.Generator().manual_seed(1_000_000 * seed + number)
    starts = torch.randint(0, len(part) - LENGTH - 1, (rows,), generator=generator)
    lines = torch.stack([part[i : i + LENGTH + 1] for i in starts.tolist()])
    return {"tokens": lines[:, :-1].contiguous(), "labels": lines[:, 1:].contiguous()}


_known: list[Any] = []


def _text() -> Any:
    import torch

    if not _known:
        files = sorted((ROOT / "docs").glob("*.md"))
        _known.append(torch.tensor(list("\n".join(f.read_text() for f in files).encode("ascii", "ignore"))))
    return _known[0]


def losses(names: list[str], steps: int, seeds: int) -> list[dict[str, Any]]:
    """Loss on validation text after so many tokens, of each way of training and seed."""
    import torch

    torch.set_num_threads(1)
    found = []
    for seed in range(seeds):
        for name in names:
            found.append(
                {"training": name, "seed": seed, "losses": curve(name, seed, steps), "bytes": bytes_of(name, steps)}
            )
            print(found[-1], file=sys.stderr, flush=True)
    return found


def curve(name: str, seed: int, steps: int) -> list[tuple[int, float]]:
    """Tokens and loss: of worker 0 where there are several."""
    import torch

    from autopar.module.low_communication.compressed.emulate import EmulatedCompression
    from autopar.module.low_communication.emulate import EmulatedWorkers

    settings, rows = CURVES[name], 8
    if settings and settings.keys() <= {"weights", "gradients"}:
        return quantized_curve(settings, seed, steps, rows)
    if settings and "staleness" in settings:
        return stale_curve(settings, seed, steps, rows)
    count = WORKERS if settings else 1
    first = language_model(seed, 64, 2)
    models = [copy.deepcopy(first) for _ in range(count)]
    optimizers = [optimizer_of(name, m.parameters(), 3e-3) for m in models]
    compressed = EmulatedCompression(models, optimizers, **settings) if settings and "method" in settings else None
    workers = EmulatedWorkers(models, **settings) if settings and compressed is None else None
    held_out = batch_of(0, 128, seed, validation=True)
    points = []
    for step in range(steps):
        batch = batch_of(step, WORKERS * rows, seed)
        share = WORKERS * rows // count
        for i, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            model(**{k: v[i * share : (i + 1) * share] for k, v in batch.items()}).backward()
            if compressed is None:
                optimizer.step()
        if compressed is not None:
            compressed.step()
        if workers is not None:
            workers.step()
        if (step + 1) % LOSSES == 0:
            with torch.no_grad():
                points.append(((step + 1) * WORKERS * rows * LENGTH, float(models[0](**held_out))))
    return points


def quantized_curve(bits: dict[str, int], seed: int, steps: int, rows: int) -> list[tuple[int, float]]:
    """The same of a model that is sharded over as many devices, whose messages are in few bits."""
    import torch

    from autopar.ir.quantized.operators import from_blocks, sum_from_blocks, to_blocks

    model = language_model(seed, 64, 2)
    computing, optimizer = copy.deepcopy(model), optimizer_of("", model.parameters(), 3e-3)
    held_out = batch_of(0, 128, seed, validation=True)
    pairs = list(zip(model.parameters(), computing.parameters(), strict=True))
    # Shards are blocks of the first dim; what does not become smaller is sent whole.
    sent = {
        what: [n and is_smaller(p.numel() // WORKERS, n) for p, _ in pairs]
        for what, n in (("weights", bits.get("weights", 0)), ("gradients", bits.get("gradients", 0)))
    }

    def gather() -> None:
        with torch.no_grad():
            for (whole, own), few in zip(pairs, sent["weights"], strict=True):
                count = whole.numel() // WORKERS
                arrived = to_blocks(whole, WORKERS, bits["weights"]) if few else None
                numbers = whole if arrived is None else from_blocks(arrived, count, bits["weights"], whole.dtype)
                own.copy_(numbers.view_as(own))

    points = []
    for step in range(steps):
        batch = batch_of(step, WORKERS * rows, seed)
        gather()
        terms: list[list[torch.Tensor]] = []
        for i in range(WORKERS):
            computing.zero_grad()
            (computing(**{k: v[i * rows : (i + 1) * rows] for k, v in batch.items()}) / WORKERS).backward()
            terms.append([own.grad.clone() for _, own in pairs])
        for (whole, _), few, *own in zip(pairs, sent["gradients"], *terms, strict=True):
            n, count = bits.get("gradients", 0), whole.numel() // WORKERS
            whole.grad = torch.stack(own).sum(0)
            if few:
                payloads = torch.stack([to_blocks(t, WORKERS, n) for t in own], 1)
                summed = [sum_from_blocks(each, count, n, whole.dtype) for each in payloads]
                whole.grad = torch.cat(summed).view_as(whole)
        optimizer.step()
        if (step + 1) % LOSSES == 0:
            gather()
            with torch.no_grad():
                points.append(((step + 1) * WORKERS * rows * LENGTH, float(computing(**held_out))))
    return points


def stale_curve(settings: dict[str, Any], seed: int, steps: int, rows: int) -> list[tuple[int, float]]:
    """The same of workers whose steps take random times, of what the owners have."""
    import heapq
    import random

    import torch

    from autopar.module.low_communication.stale.emulate import EmulatedStale

    first = language_model(seed, 64, 2)
    models = [copy.deepcopy(first) for _ in range(WORKERS)]
    optimizers = [optimizer_of("", m.parameters(), 3e-3) for m in models]
    emulated = EmulatedStale(models, optimizers, **settings)
    held_out, draw = batch_of(0, 128, seed, validation=True), random.Random(seed)
    # Steps take at least 1, and a random time besides of 1 in the mean.
    computing = [(1 + draw.expovariate(1), worker) for worker in range(WORKERS)]
    heapq.heapify(computing)
    made, points, idle = [0] * WORKERS, [], set[int]()
    while sum(made) < steps * WORKERS:
        now, worker = heapq.heappop(computing)
        # Of a step each worker has rows of its own, as in the other ways of training.
        batch = batch_of(made[worker], WORKERS * rows, seed)
        optimizers[worker].zero_grad()
        models[worker](**{k: v[worker * rows : (worker + 1) * rows] for k, v in batch.items()}).backward()
        emulated.step(worker)
        made[worker] += 1
        idle.add(worker)
        for ready in sorted(w for w in idle if emulated.is_ready(w)):
            idle.discard(ready)
            heapq.heappush(computing, (now + 1 + draw.expovariate(1), ready))
        if sum(made) % (LOSSES * WORKERS) == 0:
            flat = torch.cat([owner.flat for owner in emulated.owners])
            torch.nn.utils.vector_to_parameters(flat, first.parameters())
            with torch.no_grad():
                points.append((sum(made) * rows * LENGTH, float(first(**held_out))))
    return points


def is_smaller(count: int, bits: int) -> bool:
    """Whether so many float32 numbers take fewer bytes in so many bits."""
    from autopar.costs.outer_exchange import quantized_bytes

    return quantized_bytes(count, bits) < 4 * count


def bytes_of(name: str, steps: int) -> float:
    """That each of the four workers sends in the whole run, by the closed forms."""
    from autopar.costs.cluster import Link
    from autopar.costs.outer_exchange import compressed_collectives, exchange_cost
    from autopar.module.low_communication.compressed.settings import ONEBIT, ZEROONE, Compression
    from autopar.module.low_communication.compressed.zero_one import GRADIENT, MOVED, VARIANCE, Schedule
    from autopar.module.low_communication.exchange import sent_bytes

    shapes = [tuple(p.shape) for p in language_model(0, 64, 2).parameters()]
    link, given = Link("any", bandwidth=1.0, latency=1.0), CURVES[name] or {}
    if given and given.keys() <= {"weights", "gradients"}:
        moves = [(kind, WORKERS * size) for kind, size in quantized_moves(shapes, given)]
        return steps * exchange_cost(moves, WORKERS, link).sent_bytes
    if "staleness" in given:  # a gradient to the owners, and the values that they own back
        elements = sum(p.numel() for p in language_model(0, 64, 2).parameters())
        return steps * 2 * 4 * elements * (WORKERS - 1) / WORKERS
    if given and "method" not in given:
        elements = sum(p.numel() for p in language_model(0, 64, 2).parameters())
        return steps // ROUND * sent_bytes(elements, 4, WORKERS, given.get("bits"))
    settings = Compression(**given) if given else None
    if settings is not None and settings.method == ZEROONE:
        kinds = [Schedule.of(settings).kind(step + 1) for step in range(steps)]
        sent = {VARIANCE: "", GRADIENT: ONEBIT, MOVED: ONEBIT}
        per = {
            kind: exchange_cost(compressed_collectives(how, shapes, 4, WORKERS, 0), WORKERS, link).sent_bytes
            for kind, how in sent.items()
        }
        return sum(per.get(kind, 0.0) for kind in kinds)
    plain = steps if settings is None else settings.plain_steps
    found = plain * exchange_cost(compressed_collectives("", shapes, 4, WORKERS, 0), WORKERS, link).sent_bytes
    if settings is not None:
        kinds = compressed_collectives(settings.method, shapes, 4, WORKERS, settings.how_much)
        found += (steps - plain) * exchange_cost(kinds, WORKERS, link).sent_bytes
    return found


def quantized_moves(shapes: list[tuple[int, ...]], bits: dict[str, int]) -> list[tuple[str, int]]:
    """What a shard of each parameter takes on the wire in a step, gathered and reduced."""
    from autopar.costs.outer_exchange import quantized_bytes

    found = []
    for what, kind in (("weights", "all_gather"), ("gradients", "all_to_all")):
        for count in (math.prod(shape) // WORKERS for shape in shapes):
            few = what in bits and is_smaller(count, bits[what])
            found.append((kind, quantized_bytes(count, bits[what]) if few else 4 * count))
    return found


def table(rows: list[dict[str, Any]]) -> str:
    """Seconds and bytes of a step, beside synchronous training and training without exchanges."""
    by_name = {r["training"]: r for r in rows}
    synchronous, alone = by_name.get(SYNCHRONOUS), by_name.get(ALONE)
    heads = f"{'ms a step':>10} {'exchanging':>11} {'KiB a step':>11} {'predicted':>10}"
    heads += f" {'of synchronous bytes':>21} {'over none':>10}"
    lines = [f"{'training':<20} {heads}"]
    for r in rows:
        share = f"1/{synchronous['bytes'] / r['bytes']:.1f}" if synchronous and r["bytes"] else ""
        slower = f"{r['seconds'] / alone['seconds']:10.3f}" if alone else ""
        figures = f"{1e3 * r['seconds']:10.1f} {1e3 * r['exchanging']:11.1f} {r['bytes'] / 1024:11.1f}"
        figures += f" {r['predicted'] / 1024:10.1f}" if r["predicted"] else f" {'':>10}"
        lines.append(f"{r['training']:<20} {figures} {share:>21} {slower:>10}")
    return "\n".join(lines)


def curve_table(curves: list[dict[str, Any]]) -> str:
    """Mean loss over seeds, and the largest distance from it."""
    tokens = [t for t, _ in curves[0]["losses"]]
    lines = [f"{'training':<20}" + "".join(f"{f'{t:,} tokens':>22}" for t in tokens) + f"{'MiB sent':>10}"]
    for name in dict.fromkeys(c["training"] for c in curves):
        own = [c["losses"] for c in curves if c["training"] == name]
        sent = next(c["bytes"] for c in curves if c["training"] == name)
        cells = []
        for i in range(len(tokens)):
            values = [points[i][1] for points in own]
            mean = statistics.mean(values)
            cells.append(f"{mean:.3f} ± {max(abs(v - mean) for v in values):.3f}")
        lines.append(f"{name:<20}" + "".join(f"{c:>22}" for c in cells) + f"{sent / 2**20:10.2f}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
