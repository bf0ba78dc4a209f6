"""`staged`: the pipeline of a plan with stages as tasks, with the seconds that the cost model predicts."""

from __future__ import annotations

import numpy as np

from autopar.dims import analyze
from autopar.passes.pad_dims import pad
from autopar.pipeline.choose import line_of, named_cuts
from autopar.pipeline.schedules import order_of
from autopar.plan import Plan
from autopar.program import Program
from autopar.simulate.pipeline import pipeline
from autopar.simulate.tasks import Task


def staged(program: Program, plan: Plan) -> list[Task]:
    """The tasks of the devices along the axis of the stages; of ``activations``, each holds microbatches.

    Args:
        program: of one microbatch, as `autopar.microbatch.in_microbatches` returns it.
        plan: the plan, with stages.
    """
    assert plan.pipeline is not None
    padded = pad(program, plan.padding)
    line = line_of(padded, analyze(padded), plan.inner)
    cuts = named_cuts(line, [stage.modules[0] for stage in plan.stages[1:]])
    spans = line.between(cuts)
    ahead, back = (np.array([part[a:b].sum() for a, b in spans]) for part in (line.ahead, line.back))
    link = dict(zip(plan.axis_names, plan.cluster.link_for(dict(plan.axes)), strict=True))[plan.pipeline.axis]
    hops = link.latency + line.sent[cuts] / link.bandwidth
    virtual = len(plan.stages) / dict(plan.axes)[plan.pipeline.axis]
    return pipeline(order_of(plan), ahead, back / 2, back / 2, hops, saved=1 / virtual)
