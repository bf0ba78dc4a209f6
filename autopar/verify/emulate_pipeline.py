"""A pipelined step in one process: every device works through its actions as soon as it has what they take."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from autopar.ir.ops.random import current_seed, derive_seed, step_seed
from autopar.ir.plan import Plan
from autopar.ir.program import Input, Output, Program
from autopar.pipeline.executor import StageRun, begin, end, exchange_here
from autopar.pipeline.schedules import BACKWARD_WEIGHT, Action, order_of
from autopar.pipeline.stage_graphs import BACKWARD, FORWARD, StageGraph, StageGraphs
from autopar.verify.emulate import emulate

Inputs = Callable[[int], Sequence[Sequence[torch.Tensor]]]
"""``inputs(microbatch)[i][rank]``: the local tensors of each placeholder on the ranks of a stage."""


def emulate_pipeline(
    program: Program, plan: Plan, inputs: Inputs, draw: random.Random | None = None
) -> list[list[list[torch.Tensor | None]]]:
    """Run a rewritten program in stages.

    Args:
        program: as `autopar.compiler.rewrite` returns it, for a plan with stages.
        plan: the plan.
        inputs: what goes in.
        draw: see `autopar.verify.emulate.emulate`.

    Returns:
        ``outputs[microbatch][i][rank]`` on the ranks of a stage that has the output. What does not consist of rows is
        in the last only.

    Raises:
        RuntimeError: the schedule does not come to an end, or a stage takes a parameter that it does not have.
    """
    assert plan.pipeline is not None
    cutting, inner = StageGraphs(program, len(plan.stages)), plan.inner
    names = {n.name: (i, s) for i, (n, s) in enumerate(zip(program.placeholders, program.inputs, strict=True))}
    seed = current_seed()
    rows = [v.name for o, v in _described(program) if o.kind == "result" and o.name in program.part.results and v]

    def run(piece: StageGraph, microbatch: int, values: list[Any]) -> list[Any]:
        described = tuple(Input("batch", str(i)) for i in range(len(piece.takes)))
        results = tuple(Output("result", str(i)) for i in range(len(piece.gives)))
        part = Program(piece.graph, described, results, len(results), None)
        with step_seed(derive_seed(seed, microbatch)):
            return emulate(part, inner.axis_names, inner.axis_sizes, values, draw=draw)

    def stage_run(stage: int) -> StageRun:
        def source(name: str, microbatch: int) -> Any:
            index, spec = names[name]
            if spec.kind == "parameter" and stage not in cutting.holders(spec.name):
                raise RuntimeError(f"stage {stage} takes parameter {spec.name!r}, which it does not hold")
            return list(inputs(max(microbatch, 0))[index])

        return StageRun(cutting, stage, rows, run, source, lambda name, values: values)

    runs = {stage: stage_run(stage) for stage in range(cutting.stages)}
    actions = order_of(plan)
    begin(cutting, runs, actions, exchange_here)
    _work_through([list(row) for row in actions], runs)
    end(cutting, runs, exchange_here)
    found = {stage: r.outputs() for stage, r in runs.items()}
    ranks = range(len(inputs(0)[0]))

    def value_of(output: Output, value: fx.Node | None, microbatch: int) -> list[Any]:
        home = None if value is None else cutting.result_stage(output, value)
        if value is not None and value.name in rows:
            return list(found[home or 0][value.name][microbatch])
        if value is None or microbatch < program.microbatches - 1:
            return [None for _ in ranks]
        if value.name in names:
            return list(inputs(0)[names[value.name][0]])
        stages = cutting.holders(output.name) if output.kind == "gradient" else tuple(runs)
        return list(found[stages[-1] if home is None else home][value.name])

    return [[value_of(o, v, i) for o, v in _described(program)] for i in range(program.microbatches)]


def _described(program: Program) -> list[tuple[Output, fx.Node | None]]:
    return list(zip(program.outputs, program.output_values, strict=True))


def _work_through(waiting: list[list[Action]], runs: dict[int, StageRun]) -> None:
    """Carry out the actions of every device."""
    while any(waiting):
        progress = False
        for row in waiting:
            while row and _is_ready(row[0], runs):
                _act(row.pop(0), runs)
                progress = True
        if not progress:
            raise RuntimeError(f"the schedule hangs: {', '.join(str(row[0]) for row in waiting if row)} wait")


def _is_ready(action: Action, runs: dict[int, StageRun]) -> bool:
    stage, kind, microbatch = action
    if kind == BACKWARD_WEIGHT:
        return True
    step = -1 if kind == FORWARD else 1
    if not 0 <= stage + step < len(runs):
        return True
    return runs[stage + step].has_sent(FORWARD if kind == FORWARD else BACKWARD, microbatch)


def _act(action: Action, runs: dict[int, StageRun]) -> None:
    stage, kind, microbatch = action
    run = runs[stage]
    if kind == BACKWARD_WEIGHT:
        run.weights(microbatch)
    elif kind == FORWARD:
        run.forward(microbatch, runs[stage - 1].take_sent(FORWARD, microbatch) if stage else [])
    else:
        last = stage == len(runs) - 1
        run.backward(microbatch, [] if last else runs[stage + 1].take_sent(BACKWARD, microbatch), kind)
