"""The compiler, top to bottom: what happens between `parallelize` and a module that runs on a mesh."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import autopar.strategies  # noqa: F401  registers every rule
from autopar.capture import Batch, LossFunction, capture
from autopar.capture.repeat import abridge
from autopar.costs.arguments import AXES, FLAG, FUNCTION, optional, require
from autopar.costs.budget import DefaultBudget, naming_default, reserve_of
from autopar.costs.cluster import Cluster
from autopar.costs.device import Device
from autopar.costs.memory import parse_bytes
from autopar.errors import PassError, PlanError
from autopar.ir.plan import INTERRUPTED, TIME_LIMIT, Plan
from autopar.ir.precision import Precision
from autopar.ir.program import Program
from autopar.ir.signature import binding
from autopar.ir.signature.outputs import Loss
from autopar.ir.signature.worker_rows import rows_of_worker, split_tensors
from autopar.passes import PASSES, Pass, collector_paused, run_passes
from autopar.passes.canonicalize import canonical
from autopar.passes.canonicalize.float8 import float8_linear_layers
from autopar.passes.canonicalize.precision import apply_precision
from autopar.passes.rng.replicate import replicate_random
from autopar.pipeline.custom_schedule import as_text
from autopar.search import cache
from autopar.search.arguments import (
    BATCH,
    check_float64,
    check_planning,
    policy_of,
    require_load,
    require_other_gathers,
    require_sent,
)
from autopar.search.emitted.peak import peak_of as peak_of
from autopar.search.emitted.rewritten import graphs_kept
from autopar.search.formulation.local_axes import Axes, require_rows, worker_count
from autopar.search.formulation.pins import Restrictions
from autopar.search.microbatch.flat import best_flat
from autopar.search.microbatch.shares import best_shares, require_apart
from autopar.search.microbatch.split import microbatch_program, require_early_backward
from autopar.search.options import SCHEDULE, Job, Progress, Search, silent
from autopar.search.pipeline.branch_and_bound import best_pipeline
from autopar.search.recost import gathers_of_weights, sent_in_few_bits, why_not_in_few_bits
from autopar.sharding.dims import analyze

logger = logging.getLogger("autopar")


def captured(
    model: nn.Module,
    batch: Batch,
    *,
    loss_fn: LossFunction | None = None,
    loss: Loss = None,
    training: bool | None = None,
    precision: Precision | None = None,
) -> Program:
    """Capture a model under a precision policy; its graph is as it was traced, not canonical."""
    compute = None if precision is None else precision.compute
    program = capture(model, batch, loss_fn=loss_fn, loss=loss, training=training, compute=compute)
    if precision is None:
        return program
    return apply_precision(program, precision, [t.dtype for t in binding.flatten(model, batch)[0]])


def in_canonical_form(program: Program, precision: Precision | None) -> Program:
    """A program as captured, in canonical form, with the float8 products of its policy."""
    program = canonical(program)
    linear = None if precision is None else precision.linear
    return program if linear is None else float8_linear_layers(program, linear)


def program_of(
    model: nn.Module,
    batch: Batch,
    *,
    loss_fn: LossFunction | None = None,
    loss: Loss = None,
    training: bool | None = None,
    precision: Precision | None = None,
    fused: bool = False,
) -> Program:
    """Capture a model, under a precision policy, and bring its graph into canonical form.

    Costs are counted as if a compiler fused kernels if ``fused``, see `autopar.rules.shapes.fused_kernels`.
    """
    graph = captured(model, batch, loss_fn=loss_fn, loss=loss, training=training, precision=precision)
    program = in_canonical_form(graph, precision)
    logger.debug("captured %s operators, fingerprint %s", len(program.calls), program.fingerprint)
    return replace(program, fused=fused)


def program_to_plan(
    model: nn.Module,
    batch: Batch,
    *,
    loss_fn: LossFunction | None = None,
    loss: Loss = None,
    precision: Precision | None = None,
    fused: bool = False,
    search: Search | None = None,
    progress: Progress | None = None,
) -> Program:
    """What `program_of` captures, or less: of repeated blocks a plan of the whole model needs a few only."""
    search = search or Search()

    def make(model: nn.Module) -> Program:
        return program_of(model, batch, loss_fn=loss_fn, loss=loss, precision=precision, fused=fused)

    def say(text: str) -> None:
        logger.info("%s", text)
        if progress:
            progress(text, math.inf, 0.0)

    # Random layouts, layers that are planned apart, and stages that begin at named modules need all of the blocks.
    if search.recipe == "random" or not search.tie_layers or search.stage_modules:
        return make(model)
    excluded = () if precision is None or precision.linear is None else precision.linear.exclude
    return abridge(model, make, (*search.layouts, *excluded), say)


def solve(
    program: Program,
    axes: Mapping[str, int],
    cluster: Cluster | str | Path,
    *,
    memory: str | float | None = None,
    optimizer: str = "adamw",
    search: Search | None = None,
    restrictions: Restrictions | None = None,
    progress: Progress | None = None,
    deterministic: bool = False,
    factored: bool = False,
) -> Plan:
    """Analyze a program, enumerate candidates and search; the plan carries its prediction and certificate.

    Where memory is short, this is done for several numbers of microbatches, unless one is pinned. A plan that was found
    before is read from the cache (`autopar.search.cache`), which lacks those whose search was cut short.

    Args:
        program: of the whole batch.
        axes: name and size of each mesh axis, outermost first.
        cluster: the devices.
        memory: bytes of a device; None for no limit.
        optimizer: whose state is counted.
        search: limits and pins.
        restrictions: what is decided already.
        progress: called with ``(phase, incumbent, bound)``.
        deterministic: random numbers are those of one device.
        factored: a pipeline's stages may take a factor of an axis; the plan is then for a mesh with one axis more.
    """
    search, machine = _with_table(search or Search()), Cluster.resolve(cluster)
    machine.require_mesh(axes)
    program = for_devices(program, machine.device, axes, deterministic=deterministic)
    budget = None if memory is None else parse_bytes(memory)
    job = Job(
        axes, machine, budget, optimizer, search, restrictions or Restrictions(), progress or silent,
        deterministic=deterministic,
    )  # fmt: skip
    # Graphs are full of cycles that stay alive: Python's collector would walk all of them again and again.
    with naming_default(memory), collector_paused(), graphs_kept():
        dims = analyze(program)
        require_load(search, dims)
        kind = f"random numbers {'at once' if deterministic else 'apart'}, factored {factored}, fused {program.fused}"
        file = cache.file_of(program, dims, job, kind)
        if file is not None and (known := cache.load(file, program, job, dims)) is not None:
            job.progress(f"plan of an earlier search, {file}", math.inf, 0.0)
            return known
        if search.shares is not None and program.training:
            plan = best_shares(program, job)
        else:
            plan = best_pipeline(program, job, factored) if search.pipelines else best_flat(program, job)
        if machine.groups and plan.pipeline is None and plan.shares is None:
            plan = as_the_slowest(plan)
        plan = plan.of_messages().in_float8(program.float8)
        if program.training and search.recipe != "random" and not job.restrictions.layouts:
            sent = sent_in_few_bits(program, plan, deterministic=deterministic)
            require_sent(
                sent, lambda: why_not_in_few_bits(program, plan, deterministic=deterministic), search.quantized
            )
            if search.secondary:
                require_other_gathers(gathers_of_weights(program, plan, deterministic=deterministic), search.secondary)
        # A slower machine, or a shorter limit, must not decide for later searches.
        if file is not None and plan.certificate.method not in (TIME_LIMIT, INTERRUPTED):
            cache.store(file, plan)
        return plan


def as_the_slowest(plan: Plan) -> Plan:
    """A plan that gives devices of several kinds the same work; its certificate says how they are counted."""
    note = "every device as slow as the slowest, and with the least memory"
    return replace(plan, certificate=replace(plan.certificate, space=f"{plan.certificate.space}; {note}"))


def for_devices(program: Program, device: Device, axes: Mapping[str, int], *, deterministic: bool) -> Program:
    """The program as its cost is counted on these devices: kernels of GPUs draw their dropout."""
    # Where all devices draw the numbers of one, these are drawn for all.
    draws = device.draws_dropout and (not deterministic or math.prod(axes.values()) == 1)
    if draws == program.draws_in_kernels:
        return program
    # Cached with the program: its microbatches are cached with what this gives.
    found = replace(program, draws_in_kernels=draws)
    if program.repeat is not None:
        shorter = replace(program.repeat.shorter, draws_in_kernels=draws)
        found = replace(found, repeat=replace(program.repeat, shorter=shorter))
    known: Program = program.memo.setdefault(("draws in kernels", draws), found)
    return known


def _with_table(search: Search) -> Search:
    """The search with the text of a custom schedule: plans are cached by that, and not by the name of its file."""
    if SCHEDULE not in search.pins:
        return search
    return replace(search, pins={**search.pins, SCHEDULE: as_text(search.pins[SCHEDULE])})


def rewrite(program: Program, plan: Plan, *, passes: tuple[Pass, ...] = PASSES) -> Program:
    """Run the passes; the graph is copied once, and verified after each. With microbatches the result is of one.

    Raises:
        PlanError: the plan is for another program, or was read from a file whose layouts fit no graph.
        ValueError: the program leaves blocks out.
        PassError: a pass left an invalid graph.
    """
    if program.microbatches > 1:
        raise ValueError("the program is of one microbatch; give the whole batch's")
    if program.repeat is not None:
        raise ValueError(f"the program leaves blocks of {program.repeat.path} out; capture the whole model to run it")
    require_same_graph(plan, program)
    # Gradients of a pipeline are complete before the user calls backward(): nothing may depend on its argument.
    if plan.pipeline is not None and program.training:
        require_early_backward(program)
    # Microbatches first: passes see the shapes that run. The inner plan is that of the devices of one stage.
    part = microbatch_program(program, plan.microbatches, deterministic=replicate_random in passes)
    try:
        local = run_passes(part, plan.inner, passes)
    except PassError as e:
        if not plan.certificate.claimed:
            raise
        raise PlanError(
            f"the plan was read from a file, and its layouts fit no graph: {e}; plan again, and if that fails, too, "
            "report it"
        ) from e
    require_apart(local, plan)
    return local


def require_same_graph(plan: Plan, program: Program) -> None:
    """Refuse a plan of another graph, or one whose file has lost a parameter.

    Raises:
        PlanError: says so.
    """
    if plan.fingerprint != program.fingerprint:
        raise PlanError(
            f"the plan is for another graph (fingerprint {plan.fingerprint}, this one has {program.fingerprint}): "
            "the model, its configuration, the batch's shapes or torch differ; plan again"
        )
    lost = [i.name for i in program.inputs if i.kind == "parameter" and i.name not in plan.parameters]
    if lost:
        raise PlanError(f"the plan says nothing of parameter {lost[0]!r}, which the model has; plan again")


def plan(
    model: nn.Module,
    batch: Batch,
    *,
    cluster: Cluster | str | Path,
    axes: Mapping[str, int] | None = None,
    loss_fn: LossFunction | None = None,
    loss: Loss = None,
    memory: str | float | None = None,
    optimizer: str = "adamw",
    precision: Precision | str | torch.dtype | None = None,
    compile: bool = False,
    search: Search | None = None,
    progress: Progress | None = None,
) -> Plan:
    """Plan for devices that are not here: no process group, no GPU, no weights.

    Args:
        model: real, fake or on the meta device.
        batch: example of the *global* batch: tuple or dict of real, fake or meta tensors.
        cluster: a `Cluster`, a preset's name or a TOML file.
        axes: name and size of each mesh axis, outermost first; default: one axis over one innermost group, or over all
            devices of a cluster with groups.
        loss_fn: ``loss_fn(output, batch)`` for a model that does not return its loss.
        loss: which scalar of the output is the loss, as for `autopar.parallelize`.
        memory: budget per device, such as ``"70GiB"``; default: the device's memory less what
            `autopar.costs.budget` sets aside. On a cluster of several kinds of devices it is of those with the least
            memory, and stages on others may take as much more as these have.
        optimizer: whose state the budget counts: adamw, adam, sgd, sgd-momentum, adagrad.
        precision: a `Precision`, or the dtype to compute in, such as ``"bf16"``; default: the model's own. ``"fp8"`` is
            bfloat16 with linear layers in float8, see `Float8`.
        compile: the plan is for ``parallelize(..., compile=True)``: costs are those of kernels that a compiler fuses.
        search: limits and pins.
        progress: called with ``(phase, incumbent, bound)``.

    Raises:
        ValueError: an argument is wrong.
        CaptureError, MissingRuleError, InfeasibleError: see there.
    """
    require(batch=(batch, BATCH))
    check_planning(model, batch, loss_fn, loss, memory, optimizer, search)
    require(axes=(axes, optional(AXES)), compile=(compile, FLAG), progress=(progress, optional(FUNCTION)))
    policy = policy_of(model, precision, search)
    check_float64(model, policy, search)
    machine = Cluster.resolve(cluster)
    axes = axes or {"device": machine.devices or (machine.group_sizes[0] if machine.group_sizes else 1)}
    search = search or Search()
    search.require_axes(axes)
    role = search.worker_role
    workers, axes, search = search.of_worker(axes)
    program = program_to_plan(
        model, part_of_worker(model, batch, workers), loss_fn=loss_fn, loss=loss, precision=policy, fused=compile,
        search=search, progress=progress,
    )  # fmt: skip
    if workers:
        require_rows(program, split_tensors(binding.flatten(model, batch)[0]))
    budget = default_memory(machine, axes) if memory is None else memory
    # Factored: there is no mesh yet, so a plan may ask for one with an axis more.
    # A worker's axes are a part of the mesh, which cannot be split further.
    return solve(
        program, axes, machine, memory=budget, optimizer=optimizer, search=search, progress=progress,
        factored=not workers,
    ).of_workers(workers, role)  # fmt: skip


def part_of_worker(model: nn.Module, batch: Any, workers: Axes) -> Any:
    """The first worker's part of a batch; all of it where there are no workers.

    Raises:
        ValueError: the samples do not divide.
    """
    if not workers:
        return batch
    tensors, skeleton = binding.flatten(model, batch)
    return skeleton.fill(rows_of_worker(tensors, 0, worker_count(workers)))


def default_memory(machine: Cluster, axes: Mapping[str, int]) -> DefaultBudget:
    """Bytes of a device that a plan may use by default: all but what `autopar.costs.budget` sets aside.

    Raises:
        ValueError: nothing is left.
    """
    return DefaultBudget(reserve_of(machine.device.kind, machine.device.memory, axes))
