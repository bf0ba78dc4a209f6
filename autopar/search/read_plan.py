"""`plan_of`: the plan that the labels of all variables stand for."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from autopar.ir.layout import Layout
from autopar.ir.plan import EVERY, Certificate, Plan
from autopar.ir.program import Program
from autopar.search.formulation.build import Formulation
from autopar.search.options import Job
from autopar.search.solver.layer_mix import LayerMix
from autopar.sharding.dims import Dims
from autopar.sharding.layer_classes import LayerClasses
from autopar.sharding.redistribute import Tables


def plan_of(
    program: Program,
    dims: Dims,
    classes: LayerClasses,
    built: Formulation,
    mix: LayerMix,
    certificate: Certificate,
    job: Job,
    tables: Tables,
) -> Plan:
    """A plan from the label of every variable, and from the states of its members.

    Members of a layer class share their layout; what they save for backward may be split over layers: the first members
    follow the first labeling, the next the second, and so on.
    """
    layouts: dict[str, Layout] = {}
    choices: dict[str, tuple[str, ...]] = {}
    consumer_layouts: dict[str, Layout] = {}
    recompute: dict[str, tuple[tuple[int, int], ...]] = {}
    offload: dict[str, tuple[tuple[int, int], ...]] = {}
    for i, (variable, label) in enumerate(zip(built.variables, mix.labelings[-1], strict=True)):
        if variable.state is not None:
            # The last range is open: a plan from three captured layers holds for all of them.
            starts = [*mix.starts(variable.count)[:-1], EVERY[0][1]]
            parts = [(pair, labels[i]) for pair, labels in zip(itertools.pairwise(starts), mix.labelings, strict=True)]
            # In the model's order: the first members of a class are the first layers.
            for table, marked in ((recompute, variable.in_recompute), (offload, variable.in_offload)):
                if joined := _joined([pair for pair, own in parts if marked[own]]):
                    table[variable.key] = joined
        # An operator has strategies; its layouts follow from them.
        if variable.choices is not None:
            choices[variable.key] = variable.choices.names(int(variable.candidate[label]))
            continue
        layout = variable.layout(int(label), tables)
        if variable.key.startswith("consumer "):
            consumer_layouts[variable.key.removeprefix("consumer ")] = layout
        else:
            layouts[variable.key] = layout
    parameters, batch = {}, {}
    for node, spec in zip(program.placeholders, program.inputs, strict=True):
        if spec.kind == "parameter":
            parameters[spec.name] = layouts[classes.key[node]]
        if spec.kind == "batch":
            batch[spec.name] = layouts[classes.key[node]]
    results = {o.name: layouts[f"result {o.name}"] for o in program.outputs if o.kind == "result"}
    return Plan(
        axes=tuple(job.axes.items()), cluster=job.cluster, parameters=parameters, batch=batch, results=results,
        choices=choices, consumer_layouts=consumer_layouts, optimizer=job.optimizer, fingerprint=program.fingerprint,
        torch=str(torch.__version__), certificate=certificate, recompute=recompute,
        offload=offload, forced_consumer_layouts=job.restrictions.forced_consumer_layouts,
        fused=program.fused, quantized=job.quantized, secondary=job.search.secondary, expert_load=job.search.load,
    )  # fmt: skip


def _joined(ranges: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Ranges that are not empty, neighbors made one."""
    found: list[tuple[int, int]] = []
    for start, stop in ranges:
        if start < stop:
            found = [*found[:-1], (found[-1][0], stop)] if found and found[-1][1] == start else [*found, (start, stop)]
    return tuple(found)
