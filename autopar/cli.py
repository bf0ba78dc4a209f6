"""The ``autopar`` command; each of its subcommands is a function here.

Exit codes: 0 done; 1 `verify` or `diff` found a difference, or `ops --coverage` a wrong rule; 2 wrong input or a model
that cannot be planned; 3 nothing fits; 130 Ctrl-C.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import math
import os
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, NamedTuple

import typer

from autopar.errors import AutoparError, InfeasibleError

# torch takes a second to import: the commands that need it import what they use.

DIFFERENT, WRONG_INPUT, INFEASIBLE, STOPPED = 1, 2, 3, 130

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Model = Annotated[str, typer.Option(metavar="FILE.py:FUNCTION", help="Function that returns (model, batch).")]
Axes = Annotated[str, typer.Option(metavar="NAME=SIZE,...", help="Mesh axes, outermost first: node=32,gpu=8.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else on stdout.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Policy = Annotated[
    str | None,
    typer.Option(metavar="bf16|fp16|...", help="Compute in this, keep and reduce in fp32."),
]
Machine = Annotated[str, typer.Option("--cluster", metavar="NAME|FILE.toml", help="A preset (see doctor) or a file.")]
Memory = Annotated[str | None, typer.Option(help="Budget per device, such as 70GiB; default: 0.9 of it.")]
Optimizer = Annotated[str, typer.Option(help="Whose state the budget counts.")]
Recipe = Annotated[str | None, typer.Option(metavar="NAME", help="ddp, fsdp, hsdp, megatron, ...; default: search.")]
RolesOption = Annotated[
    str, typer.Option("--roles", metavar="AXIS=ROLE,...", help="What axes are for: node=data,gpu=tensor.")
]
Limit = Annotated[float, typer.Option(metavar="SECONDS", help="Time limit of the search.")]
NoCache = Annotated[bool, typer.Option("--no-cache", help="Search anew, and do not keep what is found.")]


class Task(NamedTuple):
    """What FUNCTION returns: a model, an example batch and, for a model that does not return its loss, a loss."""

    model: Any
    batch: Any
    loss_fn: Any = None


def _print_version(wanted: bool) -> None:
    if wanted:
        try:
            version = importlib.metadata.version("autopar")
        except importlib.metadata.PackageNotFoundError:
            version = "from its sources, not installed"
        typer.echo(f"autopar {version}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Plan the layout of a PyTorch model on many devices, and check that the plan computes the same."""


@app.command("plan")
def plan_command(
    model: Model,
    cluster: Machine,
    axes: Axes,
    memory: Memory = None,
    optimizer: Optimizer = "adamw",
    precision: Policy = None,
    recipe: Recipe = None,
    roles: RolesOption = "",
    microbatches: Annotated[
        int | None, typer.Option(help="Parts of the batch, one after the other; default: as memory asks for.", min=1)
    ] = None,
    microbatch: Annotated[
        int | None, typer.Option(help="Samples at a time, with axes pp, dp, tp of recipe megatron.", min=1)
    ] = None,
    schedule: Annotated[
        str, typer.Option(metavar="1f1b|...", help="Of axis pp: gpipe, 1f1b, interleaved or zb-h1.")
    ] = "1f1b",
    virtual: Annotated[int, typer.Option(help="Runs of blocks on each stage, for interleaved.", min=1)] = 1,
    recompute: Annotated[
        str, typer.Option(metavar="none|selective|full", help="What the backward makes again.")
    ] = "none",
    time_limit: Limit = 60.0,
    check: Annotated[bool, typer.Option("--check", help="Verify the lower bound apart from the search.")] = False,
    no_cache: NoCache = False,
    save: Annotated[Path | None, typer.Option(metavar="FILE.json", help="Write the plan to a file.")] = None,
    report: Annotated[
        Path | None, typer.Option(metavar="FILE.html", help="Write a page with timeline, memory and what-ifs.")
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Find the fastest layouts of a model on a mesh, for devices that need not be here, and compare with recipes."""
    with _clear_errors(debug):
        sizes = parse_axes(axes)
        _check_target("--save", save)
        _check_target("--report", report)
        task = load_task(model)
        from autopar.hybrid import STAGE_NAMES

        asked = microbatch is not None or recompute != "none" or schedule != "1f1b" or virtual > 1
        if asked or any(name in STAGE_NAMES for name in sizes):
            _check_hybrid(recipe, roles, save, report)
            _print_hybrid(
                task,
                as_json,
                cluster=cluster,
                axes=sizes,
                microbatch=microbatch,
                schedule=schedule,
                virtual=virtual,
                recompute=recompute,
                memory=memory,
                optimizer=optimizer,
                precision=precision,
                time_limit=time_limit,
            )
            return
        from autopar.comparison import plan_and_compare
        from autopar.plan import INTERRUPTED
        from autopar.precision import Precision
        from autopar.report.comparison import comparison_list, comparison_table
        from autopar.report.progress import SearchProgress
        from autopar.search.find import Search

        pins = {} if microbatches is None else {"microbatches": microbatches}
        search = Search(
            time_limit=time_limit, recipe=recipe, roles=parse_roles(roles), pins=pins, check=check, cache=not no_cache
        )
        with SearchProgress() as progress:
            found, beside = plan_and_compare(
                task.model,
                task.batch,
                cluster=cluster,
                axes=sizes,
                loss_fn=task.loss_fn,
                memory=memory,
                optimizer=optimizer,
                precision=Precision.resolve(precision),
                search=search,
                progress=progress,
            )
        if save is not None:
            found.save(save)
            typer.echo(f"saved {save}", err=True)
        stopped = found.certificate.method == INTERRUPTED
        if report is not None and not stopped:
            _write_report(report, task, found, beside, memory, Precision.resolve(precision), search)
        if as_json:
            typer.echo(json.dumps({**found.to_dict(), "recipes": comparison_list(found, beside)}, indent=1))
        else:
            typer.echo(f"{found.summary()}\n\n{comparison_table(found, beside)}")
        if stopped:
            raise typer.Exit(STOPPED)


def _write_report(
    file: Path, task: Task, found: Any, beside: Any, memory: str | None, precision: Any, search: Any
) -> None:
    from autopar.compiler import default_memory
    from autopar.cost.memory import parse_bytes
    from autopar.page import report_page
    from autopar.report.progress import counted

    budget = default_memory(found.cluster) if memory is None else parse_bytes(memory)
    own = {"loss_fn": task.loss_fn, "precision": precision, "search": search}
    with counted("what if: searched") as tick:
        page = report_page(task.model, task.batch, found, beside, budget=budget, tick=tick, **own)
    file.write_text(page, encoding="utf-8")
    typer.echo(f"saved {file}", err=True)


def _check_hybrid(recipe: str | None, roles: str, save: Path | None, report: Path | None) -> None:
    """Stages and microbatches are simulated for one recipe; what goes with runnable plans only is refused.

    Raises:
        ValueError: names the option and the remedy.
    """
    if recipe != "megatron":
        raise ValueError("stages, microbatches and recomputation are predicted for --recipe megatron; add it")
    if roles:
        raise ValueError("--roles says nothing here: the names of the axes do (pp, dp, tp); leave it out")
    if save is not None:
        raise ValueError("--save writes plans that can be run; one with stages is only predicted: use --json")
    if report is not None:
        raise ValueError("--report is of plans that can be run; for one with stages use --json, or simulate --trace")


def _print_hybrid(task: Task, as_json: bool, *, precision: str | None, **options: Any) -> None:
    from autopar.hybrid import predict_hybrid
    from autopar.precision import Precision
    from autopar.report.hybrid import hybrid_table
    from autopar.report.progress import SearchProgress

    policy = Precision.resolve(precision)
    with SearchProgress() as progress:
        found = predict_hybrid(
            task.model, task.batch, loss_fn=task.loss_fn, precision=policy, progress=progress, **options
        )
    typer.echo(json.dumps(found.to_dict(), indent=1) if as_json else hybrid_table(found.to_dict()))


@app.command("explain")
def explain_command(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A parameter, batch.N, result.N, a module or a node.")],
    model: Model,
    cluster: Machine,
    axes: Axes,
    why_not: Annotated[
        str | None, typer.Option(metavar="PLACEMENT@AXIS,...", help="Only this: Shard(1)@gpu, R@node.")
    ] = None,
    memory: Memory = None,
    optimizer: Optimizer = "adamw",
    precision: Policy = None,
    recipe: Recipe = None,
    roles: RolesOption = "",
    time_limit: Limit = 60.0,
    no_cache: NoCache = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Say why a tensor lies as it does, solving again with other placements, and why what is kept is kept."""
    with _clear_errors(debug):
        sizes = parse_axes(axes)
        task = load_task(model)
        from autopar.cluster import Cluster
        from autopar.compiler import default_memory, in_microbatches, program_to_plan, solve
        from autopar.keeping import keeping, named
        from autopar.precision import Precision
        from autopar.question import alternatives, ask, layout_in, lies, parse_wanted, tensor_of
        from autopar.report.keeping import keeping_dict, keeping_table
        from autopar.report.progress import SearchProgress
        from autopar.report.question import answers_dict, answers_table
        from autopar.search.find import Search

        wanted = parse_wanted(why_not, sizes) if why_not else None
        machine = Cluster.resolve(cluster)
        search = Search(time_limit=time_limit, recipe=recipe, roles=parse_roles(roles), cache=not no_cache)
        budget = default_memory(machine) if memory is None else memory
        with SearchProgress() as progress:
            policy = Precision.resolve(precision)
            program = program_to_plan(task.model, task.batch, loss_fn=task.loss_fn, precision=policy, search=search)
            asked = wanted is not None or lies(program, name)
            own = tensor_of(program, name)[0] if asked else name
            named(program, own)  # complain before the search
            found = solve(program, sizes, machine, memory=budget, optimizer=optimizer, search=search, progress=progress)
            others = [wanted] if wanted else alternatives(program, found, own) if asked else []
            answers = [
                ask(program, found, own, other, memory=budget, search=search, progress=progress) for other in others
            ]
            tensors = keeping(in_microbatches(program, found.microbatches), found, own)
        facts, parts = keeping_dict(own, found, tensors), [keeping_table(found, tensors)] if tensors else []
        if asked:
            layout = " ".join(f"{p}@{axis}" for axis, p in zip(sizes, layout_in(found, own), strict=True))
            facts |= answers_dict(own, layout, found, answers)
            parts.insert(0, answers_table(own, layout, found, answers))
        typer.echo(json.dumps(facts, indent=1) if as_json else "\n\n".join(parts))


@app.command("diff")
def diff_command(
    first: Annotated[Path, typer.Argument(metavar="FIRST.json", help="A plan that `plan --save` wrote.")],
    second: Annotated[Path, typer.Argument(metavar="SECOND.json", help="Another one.")],
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Compare two plans: figures, layouts and where time goes; exit code 1 if they differ."""
    with _clear_errors(debug):
        from autopar.plan import Plan
        from autopar.report.difference import difference, difference_table

        plans = Plan.load(first), Plan.load(second)
        found = difference(*plans)
        names = (first.stem, second.stem) if first.stem != second.stem else ("first", "second")
        typer.echo(json.dumps(found, indent=1) if as_json else difference_table(*plans, names))
        if not found["same"]:
            raise typer.Exit(DIFFERENT)


@app.command("verify")
def verify_command(
    model: Model,
    axes: Axes,
    plan: Annotated[
        str | None, typer.Option(metavar="FILE.json|random", help="A plan, or a random feasible one; default: search.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of a random plan.")] = 0,
    precision: Policy = None,
    tolerance: Annotated[float, typer.Option(help="Largest error that is still equal.")] = 1e-9,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Run the rewritten graphs of every device in this process, in float64, and compare with the plain model."""
    with _clear_errors(debug):
        sizes = parse_axes(axes)
        if not tolerance >= 0:
            raise ValueError(f"--tolerance must be a number that is not negative, got {tolerance}")
        task = load_task(model)
        from autopar.plan import Plan
        from autopar.report.equivalence import agrees, equivalence_dict, equivalence_table
        from autopar.verify import verify

        chosen = plan if plan in (None, "random") else Plan.load(str(plan))
        report = verify(
            task.model, task.batch, sizes, loss_fn=task.loss_fn, plan=chosen, seed=seed, precision=precision
        )
        text = json.dumps(equivalence_dict(report, tolerance), indent=1) if as_json else ""
        typer.echo(text or equivalence_table(report, tolerance))
        if not agrees(report, tolerance):
            raise typer.Exit(DIFFERENT)


@app.command("simulate")
def simulate_command(
    model: Annotated[str | None, typer.Option(metavar="FILE.py:FUNCTION", help="With --plan: what it is of.")] = None,
    plan: Annotated[
        Path | None, typer.Option(metavar="FILE.json", help="Run the graph that a plan makes of a model.")
    ] = None,
    precision: Policy = None,
    schedule: Annotated[
        str | None, typer.Option(metavar="1f1b|...", help="Run a pipeline: gpipe, 1f1b, interleaved or zb-h1.")
    ] = None,
    stages: Annotated[int, typer.Option(help="Devices of the pipeline.")] = 0,
    microbatches: Annotated[int, typer.Option(help="Of a step.")] = 0,
    forward: Annotated[float | None, typer.Option(metavar="MS", help="Of a microbatch on a device.")] = None,
    backward_input: Annotated[float | None, typer.Option(metavar="MS", help="Of the backward: for the input.")] = None,
    backward_weight: Annotated[float | None, typer.Option(metavar="MS", help="The same: for the weights.")] = None,
    communication: Annotated[float, typer.Option(metavar="MS", help="From a stage to the next.")] = 0.0,
    virtual: Annotated[int, typer.Option(help="Stages on each device, which share its time evenly.")] = 1,
    trace: Annotated[Path | None, typer.Option(metavar="FILE.json", help="Write a trace for Perfetto.")] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Run a plan's graph, or a pipeline with given durations: how long a step takes, what waits, and what is held."""
    with _clear_errors(debug):
        if (plan is None) == (schedule is None) or (plan is None) != (model is None):
            raise ValueError("simulate either --model and --plan, or a --schedule with its durations")
        durations = (forward, backward_input, backward_weight)
        if plan is not None and (stages or microbatches or communication or virtual != 1 or any(durations)):
            raise ValueError("--stages, --microbatches, --virtual and durations are of a --schedule; leave them out")
        if schedule is not None and precision is not None:
            raise ValueError("--precision is of a --plan; leave it out")
        _check_target("--trace", trace)
        from autopar.simulate import chrome_trace

        if model is not None and plan is not None:
            timeline, facts, table = _simulated_plan(load_task(model), plan, precision)
        else:
            costs = (*durations, communication)
            timeline, facts, table = _simulated_pipeline(str(schedule), stages, microbatches, costs, virtual)
        if trace is not None:
            trace.write_text(json.dumps(chrome_trace(timeline)), encoding="utf-8")
            typer.echo(f"saved {trace}", err=True)
        typer.echo(json.dumps(facts, indent=1) if as_json else table)


def _simulated_plan(task: Task, file: Path, precision: str | None) -> tuple[Any, dict[str, Any], str]:
    """A timeline of a plan's step, its figures and its table."""
    from autopar.compiler import program_of, rewrite
    from autopar.plan import Plan
    from autopar.precision import Precision
    from autopar.report.progress import SearchProgress
    from autopar.report.simulation import step_table
    from autopar.simulate import simulate
    from autopar.simulate.emitted import emitted, step_facts

    plan = Plan.load(file)
    with SearchProgress():
        program = program_of(task.model, task.batch, loss_fn=task.loss_fn, precision=Precision.resolve(precision))
        timeline = simulate(emitted(rewrite(program, plan), plan))
    facts = step_facts(timeline, plan)
    return timeline, facts, step_table(facts)


def _simulated_pipeline(
    schedule: str, stages: int, microbatches: int, milliseconds: Sequence[float | None], virtual: int
) -> tuple[Any, dict[str, Any], str]:
    """A timeline of a pipeline, its figures and its table."""
    names = ("--forward", "--backward-input", "--backward-weight", "--communication")
    seconds = []
    for option, value in zip(names, milliseconds, strict=True):
        if value is None or not 0 <= value < math.inf:
            raise ValueError(f"{option} {'is missing' if value is None else value}: give milliseconds, 0 or more")
        seconds.append(value / 1e3)
    from autopar.report.simulation import pipeline_table
    from autopar.simulate import order, pipeline, simulate

    rows = order(schedule, stages, microbatches, virtual)
    ahead, for_input, for_weight, sending = seconds
    tasks = pipeline(rows, ahead / virtual, for_input / virtual, for_weight / virtual, sending, saved=1 / virtual)
    timeline = simulate(tasks)
    numbers = {"stages": stages, "microbatches": microbatches, "virtual": virtual}
    facts: dict[str, Any] = {"schedule": schedule, **numbers, **timeline.to_dict()}
    for device in facts["devices"]:
        # A byte was saved for each microbatch.
        device["peak_microbatches"] = device.pop("peak_memory_bytes")["activations"]
    return timeline, facts, pipeline_table(facts)


@app.command("calibrate")
def calibrate_command(
    save: Annotated[Path, typer.Option(metavar="FILE.toml", help="Where the cluster goes, for --cluster.")],
    ranks: Annotated[int, typer.Option(help="Processes on this machine, where torchrun started none.", min=1)] = 2,
    threads: Annotated[
        int | None, typer.Option(help="Of each process; default: its share of the cores.", min=1)
    ] = None,
    dtypes: Annotated[str, typer.Option(metavar="NAME,...", help="float32, bfloat16, ...")] = "float32",
    base: Annotated[
        str | None, typer.Option(metavar="NAME|FILE.toml", help="Gives what is not measured; default: cpu or h100.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.svg", help="Picture of measured and fitted times.")] = None,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="Time limit.", min=1)] = 600.0,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Measure kernels and collectives of the devices at hand, and write the cluster that fits them."""
    with _clear_errors(debug):
        from autopar.cluster import FLOAT_DTYPES

        names = tuple(name.strip() for name in dtypes.split(","))
        for name in names:
            if name not in FLOAT_DTYPES:
                raise ValueError(f"--dtypes {dtypes!r}: {name!r} is none of {', '.join(FLOAT_DTYPES)}")
        _check_target("--save", save)
        _check_target("--plot", plot)
        from autopar.calibrate import Settings, calibrate
        from autopar.calibrate.fit import predicted_seconds
        from autopar.report.calibration import calibration_dict, calibration_plot, calibration_table
        from autopar.report.progress import counted

        settings = Settings(names, threads=threads or max(1, (os.cpu_count() or 1) // ranks), timeout=timeout)
        with counted("measured") as tick:
            found = calibrate(settings, ranks=ranks, base=base, name=save.stem, tick=tick)
        if found is None:  # another rank says it
            return
        cluster, samples = found
        fitted = predicted_seconds(samples, cluster.device, cluster.links).tolist()
        cluster.save(save)
        if plot is not None:
            plot.write_text(calibration_plot(samples, fitted), encoding="utf-8")
        for path in (save, plot):
            if path is not None:
                typer.echo(f"saved {path}", err=True)
        show = calibration_table(cluster, samples, fitted)
        typer.echo(json.dumps(calibration_dict(cluster, samples, fitted), indent=1) if as_json else show)


@app.command("doctor")
def doctor_command(as_json: Json = False, debug: Debug = False) -> None:
    """Say what this machine has of what autopar uses, what is missing, and how to get it."""
    with _clear_errors(debug):
        from autopar.report.doctor import doctor_table, examine

        facts = examine()
        typer.echo(json.dumps(facts, indent=1) if as_json else doctor_table(facts))


@app.command("ops")
def ops_command(
    model: Annotated[
        str | None, typer.Option(metavar="FILE.py:FUNCTION", help="Also list what is discovered for this model.")
    ] = None,
    coverage: Annotated[bool, typer.Option("--coverage", help="Examine torch's own operator samples.")] = False,
    only: Annotated[str, typer.Option(metavar="TEXT", help="Operators whose name contains this.")] = "",
    workers: Annotated[int, typer.Option(help="Processes of --coverage.", min=1)] = 1,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """List the rules of operators, or measure how many of torch's operators they cover."""
    with _clear_errors(debug):
        if coverage:
            _print_coverage(only, workers, as_json)
            return
        from autopar.operators import list_rules
        from autopar.report.operators import operators_table

        task = load_task(model) if model else None
        rows = list_rules(task and (task.model, task.batch, task.loss_fn), only)
        typer.echo(json.dumps(rows, indent=1) if as_json else operators_table(rows))


def _print_coverage(only: str, workers: int, as_json: bool) -> None:
    """Exit code 1 if the oracle refutes a rule."""
    from autopar.coverage.run import cover, figures_of
    from autopar.report.operators import coverage_table
    from autopar.report.progress import counted

    with counted("operators") as tick:
        figures = figures_of(cover(only, workers=workers, tick=tick))
    typer.echo(json.dumps(figures, indent=1) if as_json else coverage_table(figures))
    if any(counts["failures"] for counts in figures["by_dtype"].values()):
        raise typer.Exit(DIFFERENT)


@contextlib.contextmanager
def _clear_errors(debug: bool) -> Iterator[None]:
    """Errors that a user can act on become one line and an exit code; others are bugs and keep their traceback."""
    try:
        yield
    except (AutoparError, ValueError, OSError) as error:
        if debug:
            traceback.print_exc()
        typer.echo(f"error: {' '.join(str(error).split()) or type(error).__name__}", err=True)
        raise typer.Exit(INFEASIBLE if isinstance(error, InfeasibleError) else WRONG_INPUT) from error
    except KeyboardInterrupt as error:
        typer.echo("stopped", err=True)
        raise typer.Exit(STOPPED) from error


def parse_axes(text: str) -> dict[str, int]:
    """Axes from ``node=32,gpu=8``.

    Raises:
        ValueError: a part is not NAME=SIZE, a size is not a positive integer, or a name comes twice.

    >>> parse_axes("node=32, gpu=8")
    {'node': 32, 'gpu': 8}
    """
    axes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = (piece.strip() for piece in part.partition("="))
        if not name or not size.isascii() or not size.isdigit() or int(size) < 1:
            raise ValueError(f"--axes {text!r}: {part.strip()!r} is not NAME=SIZE; write for example node=32,gpu=8")
        if name in axes:
            raise ValueError(f"--axes {text!r} names axis {name!r} twice; give each axis a name of its own")
        axes[name] = int(size)
    return axes


def parse_roles(text: str) -> dict[str, str]:
    """Roles of axes from ``node=data,gpu=tensor``.

    Raises:
        ValueError: a part is not AXIS=ROLE.

    >>> parse_roles("node=data, gpu=tensor")
    {'node': 'data', 'gpu': 'tensor'}
    """
    roles = {}
    for part in text.split(",") if text else ():
        axis, _, role = (piece.strip() for piece in part.partition("="))
        if not axis or not role:
            raise ValueError(f"--roles {text!r}: {part.strip()!r} is not AXIS=ROLE; write for example gpu=tensor")
        roles[axis] = role
    return roles


def load_task(spec: str) -> Task:
    """Model and batch from ``FILE.py:FUNCTION``; the file's folder is importable from then on.

    Raises:
        ValueError: there is no such function, it fails, or it returns something else; says where.
        OSError: the file cannot be read.
    """
    file, separator, name = spec.rpartition(":")
    if not separator or not file or not name.isidentifier():
        raise ValueError(f"--model {spec!r} is not FILE.py:FUNCTION; write for example model.py:make")
    function = getattr(_import_file(Path(file)), name, None)
    if not callable(function):
        raise ValueError(f"{file} has no function {name!r}; write one that returns (model, batch)")
    with _user_code(spec):
        made = function()
    if isinstance(made, Mapping) or not isinstance(made, tuple) or len(made) not in (2, 3):
        raise ValueError(f"{spec} returned {type(made).__name__}; it must return (model, batch) or add a loss_fn")
    import torch

    if not isinstance(made[0], torch.nn.Module):
        raise ValueError(f"{spec} returned a {type(made[0]).__name__} as the model; it must be a torch.nn.Module")
    return Task(*made)


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ValueError(f"no file {path}; --model takes FILE.py:FUNCTION")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} is not a Python file; --model takes FILE.py:FUNCTION")
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)  # classes of the file can be pickled
    with _user_code(str(path)):
        spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def _user_code(what: str) -> Iterator[None]:
    """An exception of the user's file, with its line."""
    try:
        yield
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        raise ValueError(f"{what} failed at {last.filename}:{last.lineno}: {type(error).__name__}: {error}") from error


def _check_target(option: str, path: Path | None) -> None:
    """Complain before a long search, not after it."""
    if path is not None and not path.resolve().parent.is_dir():
        raise ValueError(f"{option} {path}: there is no folder {path.resolve().parent}; make it first")


def main() -> None:
    """Entry point of the ``autopar`` command."""
    app()


if __name__ == "__main__":
    main()
