"""``python -m autopar.cli.demo``: a small language model, trained on four processes next to the same training on one.

The model reads the Python standard library's own source, byte by byte. Every process is a Gloo rank on this machine;
rank 0 also trains the plain model on the same batches and compares loss and gradients at every step.
"""

from __future__ import annotations

import os
import queue
import socket
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.multiprocessing
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text
from torch import nn
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

from autopar.cli.options import parse_axes
from autopar.errors import AutoparError
from autopar.ir.plan import Plan

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class DemoSettings:
    """What every process needs to know; after ``limit`` seconds without a step the processes are killed."""

    axes: dict[str, int]
    steps: int
    folder: str
    port: int
    limit: float = 600.0
    vocabulary: int = 256
    sequence: int = 128
    batch: int = 16
    hidden: int = 192
    layers: int = 3


@dataclass(frozen=True)
class StepComparison:
    """What rank 0 reports of a step: both losses, and the largest difference of any gradient entry.

    Attributes:
        number: of the step, from 1.
        loss: of the parallelized model.
        plain_loss: of the same model on one process.
        difference: divided by the largest entry of any gradient.
        name: the parameter with this difference.
    """

    number: int
    loss: float
    plain_loss: float
    difference: float
    name: str


def make_model(settings: DemoSettings) -> nn.Module:
    """A Llama-style model of a million parameters; the same in every process."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=settings.vocabulary,
        hidden_size=settings.hidden,
        intermediate_size=3 * settings.hidden,
        num_hidden_layers=settings.layers,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=settings.sequence,
        use_cache=False,
    )
    # Every process draws the same parameters, so that none need to be sent.
    torch.manual_seed(0)
    model: nn.Module = LlamaForCausalLM(config)
    return model


def read_text(limit: int = 2_000_000) -> torch.Tensor:
    """Source of the standard library as bytes, at most ``limit`` of them.

    Raises:
        ValueError: there is none, as in some frozen distributions.
    """
    found = bytearray()
    for path in sorted(Path(os.__file__).parent.glob("*.py")):
        # Bytes are tokens: there is no tokenizer to download.
        found += path.read_bytes()
        if len(found) >= limit:
            break
    if len(found) < 100_000:
        raise ValueError(f"{Path(os.__file__).parent} has no Python source to train on; use a full Python")
    return torch.frombuffer(found[:limit], dtype=torch.uint8).long()


def batch_of(text: torch.Tensor, step: int, settings: DemoSettings) -> Batch:
    """The global batch of a step, the same in every process."""
    # By the number of the step: all processes draw the same global batch, of which each computes its part.
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(0, len(text) - settings.sequence, (settings.batch,), generator=generator)
    tokens = torch.stack([text[s : s + settings.sequence] for s in starts.tolist()])
    return {"input_ids": tokens, "labels": tokens}


def train(rank: int, settings: DemoSettings, messages: Any) -> None:
    """One process: the parallelized model on every rank, on rank 0 the plain one as well."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from autopar.parallelize import parallelize

    torch.set_num_threads(1)
    world = torch.Size(settings.axes.values()).numel()
    address = f"tcp://127.0.0.1:{settings.port}"
    dist.init_process_group(
        "gloo", init_method=address, rank=rank, world_size=world, timeout=timedelta(seconds=settings.limit)
    )
    try:
        mesh = init_device_mesh("cpu", tuple(settings.axes.values()), mesh_dim_names=tuple(settings.axes))
        text = read_text()
        batch = batch_of(text, 0, settings)
        plain = make_model(settings) if rank == 0 else None
        model = parallelize(make_model(settings), mesh, batch, plan=Path(settings.folder) / "plan.json")
        if rank == 0:
            _write_graphs(model, Path(settings.folder))
        messages.put("ready")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3) if plain is not None else None
        for number in range(settings.steps):
            batch = batch_of(text, number, settings)
            loss = model(**batch).loss
            loss.backward()
            # Gathered by all ranks, though rank 0 alone compares: a collective needs every rank.
            gradients = model.full_gradients()
            if plain is not None and plain_optimizer is not None:
                plain_loss = plain(**batch).loss
                plain_loss.backward()
                # Before the optimizer's step, so that what differs is this step's gradient.
                difference, name = compare(gradients, plain)
                messages.put(StepComparison(number + 1, loss.item(), plain_loss.item(), difference, name))
                plain_optimizer.step()
                plain_optimizer.zero_grad()
            optimizer.step()
            optimizer.zero_grad()
    finally:
        dist.destroy_process_group()


def compare(gradients: dict[str, torch.Tensor], plain: nn.Module) -> tuple[float, str]:
    """Largest difference of any gradient entry, over the largest entry of any gradient; and where it is."""
    expected = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    # One scale for all: the gradient of a bias may be all rounding.
    scale = max(float(g.abs().max()) for g in expected.values())
    return max((float((gradients[name] - g).abs().max()) / scale, name) for name, g in expected.items())


def _write_graphs(model: Any, folder: Path) -> None:
    for name in ("forward", "backward"):
        code = getattr(model, f"{name}_graph").print_readable(print_output=False)
        (folder / f"{name}_graph.txt").write_text(code + "\n", encoding="utf-8")


def search(settings: DemoSettings, folder: Path) -> Plan:
    """Plan for processes of this machine; writes the plan and its table to the folder."""
    from autopar.compiler import plan
    from autopar.explain.tables.progress import SearchProgress

    batch = batch_of(read_text(), 0, settings)
    with SearchProgress() as progress:
        found = plan(make_model(settings), batch, cluster="cpu", axes=settings.axes, progress=progress)
    found.save(folder / "plan.json")
    (folder / "plan.txt").write_text(found.summary() + "\n", encoding="utf-8")
    return found


def run(settings: DemoSettings, console: Console) -> list[StepComparison]:
    """Start the processes, follow rank 0, and kill them all if it reports nothing for as long as the limit.

    Raises:
        AutoparError: a process failed, or the time ran out.
    """
    processes: Any = torch.multiprocessing  # not annotated
    messages = processes.get_context("spawn").Queue()
    world = torch.Size(settings.axes.values()).numel()
    context = processes.spawn(train, args=(settings, messages), nprocs=world, join=False)
    deadline = time.monotonic() + settings.limit
    steps: list[StepComparison] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    try:
        with Progress(*columns, console=console) as progress:
            task = progress.add_task("starting the processes", total=settings.steps)
            done = False
            while not done:
                done = context.join(timeout=0.1)
                # Every message restarts the clock: the limit is for a step, not for the whole run.
                if _follow(messages, steps, progress, task):
                    deadline = time.monotonic() + settings.limit
                if not done and time.monotonic() > deadline:
                    last = f"step {len(steps)}" if steps else "the start"
                    raise AutoparError(f"no step for {settings.limit:.0f} s after {last}; allow more with --timeout")
    except ProcessRaisedException as e:
        raise AutoparError(f"a process failed: {str(e).strip().splitlines()[-1]}") from e
    except ProcessExitedException as e:
        raise AutoparError(f"a process ended: {e}; is there enough memory?") from e
    finally:
        for process in context.processes:
            # Beside a rank that failed, the others wait in collectives until these time out.
            if process.is_alive():
                process.kill()
    return steps


def _follow(messages: Any, steps: list[StepComparison], progress: Progress, task: Any) -> bool:
    """Read the messages of rank 0 since the last call; whether there were any."""
    received = False
    while True:
        try:
            # All that is there: with one message a call, the bar would lag behind fast steps.
            message = messages.get(timeout=0.05)
        except queue.Empty:
            return received
        received = True
        if isinstance(message, StepComparison):
            steps.append(message)
            text = f"loss {message.loss:.4f}, plain {message.plain_loss:.4f}, gradients {message.difference:.1e} apart"
            progress.update(task, completed=message.number, description=text)
        else:
            progress.update(task, description="training")


def outcome(steps: list[StepComparison]) -> str:
    """Both losses side by side, about ten lines, and the largest difference of all."""
    # About ten lines, the first and the last step always among them.
    every = max(1, len(steps) // 10)
    shown = [s for s in steps if s.number == 1 or s.number % every == 0 or s is steps[-1]]
    lines = ["step   parallel   one process   largest difference in a gradient"]
    lines += [f"{s.number:4d} {s.loss:10.6f} {s.plain_loss:13.6f}   {s.difference:.1e}  {s.name}" for s in shown]
    worst, loss = max(s.difference for s in steps), max(abs(s.loss - s.plain_loss) for s in steps)
    lines += ["", f"largest difference over {len(steps)} steps: gradients {worst:.1e} of the largest gradient entry, "]
    lines[-1] += f"loss {loss:.1e}"
    return "\n".join(lines)


def free_port() -> int:
    """A TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def demo(
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 40,
    processes: Annotated[int, typer.Option(min=1, help="Must be the product of the axes.")] = 4,
    out: Annotated[Path, typer.Option(help="Folder for plan, table and graphs.")] = Path("demo-output"),
    axes: Annotated[str, typer.Option(help="Default: data=PROCESSES/2,model=2, or data=PROCESSES if odd.")] = "",
    timeout: Annotated[
        float, typer.Option(min=1, help="Seconds without a step after which the processes are killed.")
    ] = 600.0,
) -> None:
    """Train a small language model on several processes and on one, and compare."""
    console = Console()
    try:
        even = f"data={processes // 2},model=2" if processes % 2 == 0 else f"data={processes}"
        sizes = parse_axes(axes or even)
        if torch.Size(sizes.values()).numel() != processes:
            raise ValueError(f"--axes {sizes} are not {processes} devices; set --processes to their product")
        _run_demo(DemoSettings(sizes, steps, str(out.resolve()), free_port(), timeout), out, console)
    except (AutoparError, ValueError, OSError, ImportError) as e:
        Console(stderr=True).print(Text(f"error: {e}"))
        raise typer.Exit(2) from e


def _run_demo(settings: DemoSettings, out: Path, console: Console) -> None:
    out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    count = sum(p.numel() for p in make_model(settings).parameters())
    console.print(f"Planning a Llama-style model of {count / 1e6:.1f} M parameters for {settings.axes}.")
    plan = search(settings, out)
    console.print(Text(plan.summary()), soft_wrap=True)
    # Before the processes start: OpenMP reads it when it is loaded.
    os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")
    console.print(f"\nTraining {settings.steps} steps, on {len(plan.axes)} axes, and on one process to compare.")
    console.print(Text(outcome(run(settings, console))), soft_wrap=True)
    console.print(f"\nWritten to {out}/: {', '.join(sorted(p.name for p in out.iterdir()))}", highlight=False)


def main() -> None:
    """Entry point."""
    typer.run(demo)


if __name__ == "__main__":
    main()
