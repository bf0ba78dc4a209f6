"""`parallelize`: a single-device model becomes a distributed one whose training loop is unchanged."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parameter import is_lazy

from autopar.capture import Batch, LossFunction
from autopar.capture.export import UNLESS_LATER
from autopar.capture.swap import refuse_opaque
from autopar.costs.arguments import FLAG, FUNCTION, PATH, a, number, optional, require
from autopar.costs.calibrate.allocator import keep_freed_memory
from autopar.costs.cluster import Cluster
from autopar.costs.memory import parse_bytes
from autopar.errors import PlanError
from autopar.ir.ops.float8.histories import register
from autopar.ir.plan import Plan
from autopar.ir.precision import DELAYED, Precision
from autopar.ir.signature.outputs import Loss
from autopar.module.lengths import Lengths, lengths_kind, plan_ahead
from autopar.module.metrics import watch
from autopar.module.parallel_module import ParallelModule, parallel_module
from autopar.module.progress import INTERVAL, Spoken, print_metrics
from autopar.module.whole_outputs import gather_outputs_without_loss
from autopar.runtime.compiled.backend import Compile, backend_of, no_backend
from autopar.runtime.compiled.compiler import Compiler
from autopar.runtime.compiled.interpreter import Interpreter
from autopar.runtime.devices import cluster_of_device
from autopar.runtime.launch.environment import is_told
from autopar.runtime.mesh import MeshContext, axes_of, mesh_context, one_device, with_axes, worker_context
from autopar.runtime.observer import Observer
from autopar.runtime.state.materialize import Init
from autopar.runtime.state.optimizer_layouts import optimizers_of_model
from autopar.runtime.state.parameters import distribute_parameters
from autopar.search.arguments import check_float64, check_planning, policy_of
from autopar.search.formulation.local_axes import Axes, exact_roles
from autopar.search.options import Search
from autopar.search.pipeline.space import is_split_for_stages, split_for_stages
from autopar.specialize import CompileOptions, default_budget


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh | None,
    batch: Batch | None = None,
    *,
    loss_fn: LossFunction | None = None,
    loss: Loss = None,
    inputs: str = "global",
    outputs: str = "sharded",
    memory: str | float | None = None,
    optimizer: str = "adamw",
    precision: Precision | str | torch.dtype | None = None,
    deterministic: bool = False,
    cluster: Cluster | str | Path | None = None,
    plan: Plan | str | Path | None = None,
    search: Search | None = None,
    timeout: float = 600,
    init: Init | None = None,
    check: bool = False,
    compile: Compile = None,
    lengths: Lengths | None = None,
) -> ParallelModule:
    """Distribute a model over a mesh; every rank calls it with the same model.

    Args:
        model: its parameters become DTensors in place; it may be on the meta device.
        mesh: of any number of axes; None for one device, without a process group. Where pipeline stages take a factor
            of an axis (pin ``stages``, or a plan), the factor becomes an axis of its own, and parameters are DTensors
            on that finer mesh.
        batch: example of the *global* batch (tuple or dict of real, fake or meta tensors): layouts are decided now.
            Without it the first call decides them.
        loss_fn: ``loss_fn(output, batch) -> scalar`` for a model that does not return its loss.
        loss: which scalar of the output is the loss: a key, attribute or index, a path of these such as
            ``"losses.total"``, or a function that picks it from the output or computes it from the output's scalars.
            Then only that loss, or a multiple of it, has gradients; microbatches and pipeline stages need that.
            ``"outside"``: what the script computes from the output, all of whose tensors have gradients then.
            Default: the only scalar that requires a gradient; of several, each has its gradient.
        inputs: ``"global"``: each rank passes the whole batch, and its part is sliced; ``"local"``: its own rows,
            see ``data_rank`` and ``data_world_size``. DTensors carry their own layout. Of a ``"global"`` batch workers
            that train apart (role ``local``) take their rows first.
        outputs: ``"sharded"``: tensors of the output that are no scalars are DTensors. ``"whole"``: each is gathered on
            every rank, with its gradient, where there is no scalar among the outputs, or with ``loss="outside"``: for a
            loss that is computed from them outside of the model.
        memory: budget per device, such as ``"70GiB"``; default: what the device has, less what
            `autopar.costs.budget` sets aside for the context, communicators, workspaces and fragments.
        optimizer: whose state the budget counts: adamw, adam, sgd, sgd-momentum, adagrad.
        precision: a `Precision`, or the dtype to compute in, such as ``"bf16"``: parameters are then stored, reduced
            and updated in float32; default: the model's own dtypes. ``"fp8"`` is bfloat16 with linear layers in float8,
            see `Float8`; it takes ``search=Search(inexact=("fp8",))``.
        deterministic: dropout and other random operators draw the same numbers as one device would, from the default
            generator, which must be in the same state on every rank; each rank draws whole tensors for that. Otherwise
            each rank draws its own shard, with seeds from rank 0's generator. No difference on one device.
        cluster: a `Cluster`, a preset's name or a TOML file; default: the preset of this machine's devices, by the name
            and memory that they report; devices of no preset are an error.
        plan: a `Plan` or a file to use instead of searching; a new batch shape is planned under its parameter layouts.
        search: limits and pins.
        timeout: seconds that a rank waits for the others, in every wait.
        init: for models on the meta device: ``init(name, tensor)`` fills one full CPU tensor in place, the same on
            every rank; or a file or folder of safetensors, of which each rank reads its part.
        check: before the first step of each mode (training or not), rank 0 emulates all devices in its own process, in
            float64, and compares with the eager model over two calls: on ``batch`` if it has values, else on the first
            one; on fewer rows where memory is short. Where not even the model fits, a warning says so.
        compile: ``True`` or ``"inductor"``: the local graphs are compiled by inductor, when they first run, between
            collectives, which stay as they are; blocks that are alike are compiled once. Or a backend as
            `torch.compile` takes them: ``(graph_module, example_inputs) -> callable``. Default: nothing is compiled.
        lengths: of sequences that will come: their graphs are made ahead, in the mode that the model is in, so that no
            step waits for them. The dims of the batch that have the length are those of one size that are no samples
            and belong to no parameter; where there are several sizes, ``{("batch.0", 1): [512, 1024]}`` says which:
            a batch tensor by its number, a dim of it, and its lengths.

    Raises:
        VerifyError: the plan does not compute what the model does; names the first difference.
        ValueError: an argument is wrong.
        CaptureError, MissingRuleError, InfeasibleError, PlanError, RankError: see there.
    """
    check_planning(model, batch, loss_fn, loss, memory, optimizer, search)
    _check_kinds(mesh, inputs, outputs, deterministic, cluster, plan, timeout, init, check, compile, lengths)
    _check_arguments(model, batch, inputs, outputs, lengths)
    if mesh is not None and search is not None and plan is None:
        search.require_axes(dict(axes_of(mesh)))
    _check_optimizers(model)
    given = Plan.load(plan) if isinstance(plan, str | Path) else plan
    if inputs == "local" and ((search or Search()).shares or (given is not None and given.shares is not None)):
        raise ValueError(
            "inputs=\"local\": each rank passes as many rows, and devices with shares of the batch (pin 'shares') take "
            'other numbers of them: pass the whole batch on each rank, inputs="global"'
        )
    policy = policy_of(model, precision, search, given)
    check_float64(model, policy, search, given)
    context, search = _context(model, mesh, given, search or Search(), timeout)
    if context.device.type == "cpu":
        keep_freed_memory()
    _check_devices(model, context)
    machine = Cluster.resolve(cluster) if cluster is not None else _cluster(context)
    if given is not None:
        _check_plan(given, context)
    backend = context.together(lambda: backend_of(compile, context.device), "choosing a compiler")
    speaks = not any(context.coordinates)
    # After the checks above: their errors leave the model as it was.
    if policy is not None:
        _store_in(policy, model)
        _with_histories(policy, model, context.device)
    machine.require_mesh(dict(context.axes))
    budget = default_budget(context, machine) if memory is None else parse_bytes(memory)
    options = CompileOptions(
        machine, budget, optimizer, search, given, loss_fn, inputs,
        # On one device both ways draw the same, and the default generator needs no seeds.
        deterministic=deterministic or context.mesh is None, loss=loss, precision=policy, check=check,
        compiler=Interpreter(context.device) if backend is None else Compiler(backend, speaks),
        fused=compile is True or compile == "inductor",  # of another backend nobody knows what it fuses
        observer=Spoken(is_told()) if speaks else Observer(),
    )  # fmt: skip
    distribute_parameters(model, context)
    parallel = parallel_module(model, context, options, init)
    _make_ready(parallel, outputs, speaks, batch, lengths)
    return parallel


def _check_kinds(
    mesh: object,
    inputs: object,
    outputs: object,
    deterministic: object,
    cluster: object,
    plan: object,
    timeout: object,
    init: object,
    check: object,
    compile: object,
    lengths: object,
) -> None:
    """Refuse arguments of another type than they are documented with; `check_planning` has looked at the others."""
    require(
        mesh=(mesh, optional(a(DeviceMesh, "a torch.distributed.DeviceMesh"))),
        inputs=(inputs, a(str, '"global" (ranks pass the whole batch) or "local" (their part)')),
        outputs=(outputs, a(str, '"sharded" (DTensors) or "whole" (plain tensors, gathered)')),
        deterministic=(deterministic, FLAG),
        cluster=(cluster, optional(a((Cluster, str, Path), "a Cluster, a preset's name or a TOML file"))),
        plan=(plan, optional(a((Plan, str, Path), "a Plan or its file"))),
        timeout=(timeout, number(0, above=True)),
        init=(init, optional(PATH if not callable(init) else FUNCTION)),
        check=(check, FLAG),
        compile=(compile, optional(no_backend)),
        lengths=(lengths, optional(lengths_kind)),
    )


def _context(
    model: nn.Module, mesh: DeviceMesh | None, plan: Plan | None, search: Search, timeout: float
) -> tuple[MeshContext, Search]:
    """This rank's mesh context, and how to search on its axes: where workers train apart, on those within one."""
    role = search.worker_role if plan is None else plan.worker_role
    search, workers = _within_worker(search, plan, mesh)
    if mesh is None:
        return one_device(_device(model)), search
    return _mesh_context(mesh, plan, search, timeout, workers, role), search


def _store_in(policy: Precision, model: nn.Module) -> None:
    """Store parameters in the dtype in which a policy updates them."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(policy.master) if parameter.is_floating_point() else parameter.data


def _with_histories(policy: Precision, model: nn.Module, device: torch.device) -> None:
    """Buffers for what delayed scaling remembers; before the first call, so that a checkpoint can be loaded by then."""
    linear = policy.linear
    if linear is not None and linear.scaling == DELAYED:
        dtype = torch.float64 if policy.compute == torch.float64 else torch.float32
        register(model, linear.exclude, linear.history, dtype, device)


def _make_ready(
    parallel: ParallelModule, outputs: str, speaks: bool, batch: Batch | None, lengths: Lengths | None
) -> None:
    """Hooks on the module's outputs, and plans for batches that are known."""
    if outputs == "whole":
        gather_outputs_without_loss(parallel)
    if speaks and is_told():
        watch(parallel, print_metrics, seconds=INTERVAL)
    if batch is not None:
        parallel.specialize(batch)
        if lengths is not None:
            plan_ahead(parallel._autopar, batch, lengths)


def _check_arguments(model: nn.Module, batch: Batch | None, inputs: str, outputs: str, lengths: Lengths | None) -> None:
    if lengths is not None and batch is None:
        raise ValueError("lengths= needs batch=, an example whose sequences are brought to these lengths: pass it")
    if isinstance(model, ParallelModule):
        raise ValueError("the model is parallelized already; pass the original to parallelize")
    if not any(True for _ in model.parameters()):
        raise ValueError(f"{type(model).__name__} has no parameters: there is nothing to parallelize{UNLESS_LATER}")
    if inputs not in ("global", "local"):
        raise ValueError(f'inputs={inputs!r}: expected "global" (ranks pass the whole batch) or "local" (their part)')
    if outputs not in ("sharded", "whole"):
        raise ValueError(f'outputs={outputs!r}: expected "sharded" (DTensors) or "whole" (plain tensors, gathered)')
    if outputs == "whole" and inputs == "local":
        raise ValueError('outputs="whole" is the whole batch\'s, and inputs="local" is a part: pass inputs="global"')
    lazy = [n for n, t in (*model.named_parameters(), *model.named_buffers()) if is_lazy(t)]
    if lazy:
        raise ValueError(f"{lazy[0]!r} has no shape yet (a lazy module): call the model once before parallelize()")
    refuse_opaque(model)
    # Private attributes: torch has no public way to ask.
    hooked = [n for n, p in model.named_parameters() if p._backward_hooks or p._post_accumulate_grad_hooks]
    if hooked:
        raise ValueError(f"parameter {hooked[0]!r} has hooks, which would be lost; register them after parallelize()")


def _check_optimizers(model: nn.Module) -> None:
    """Refuse optimizers made before: they would go on updating the old parameters.

    Raises:
        ValueError: there is one.
    """
    # A mistake here would show only in a loss that stays as it is.
    for optimizer in optimizers_of_model(model):
        raise ValueError(
            f"an optimizer ({type(optimizer).__name__}) holds the model's parameters, which parallelize() "
            "replaces: make the optimizer after parallelize(), from the module that it returns"
        )


def _device(model: nn.Module) -> torch.device:
    devices = {p.device for p in model.parameters() if not p.is_meta}
    if len(devices) > 1:
        raise ValueError(f"the parameters are on {sorted(map(str, devices))}; move the model to one device")
    return devices.pop() if devices else torch.device("cpu")


def _check_devices(model: nn.Module, context: MeshContext) -> None:
    named = [*model.named_parameters(), *model.named_buffers()]
    for name, tensor in named:
        if not tensor.is_meta and tensor.device.type != context.device.type:
            raise ValueError(
                f"{name!r} is on {tensor.device} and the mesh is of {context.device.type} devices; "
                f"call model.to({str(context.device)!r}) first"
            )


def _cluster(context: MeshContext) -> Cluster:
    """The preset of this machine's devices.

    Raises:
        ValueError: none is of these devices.
    """
    if context.device.type != "cuda":
        return cluster_of_device(context.device)
    # Together: a device of no preset on one rank is an error on all.
    return context.together(lambda: cluster_of_device(context.device), "choosing a preset")


def _within_worker(search: Search, plan: Plan | None, mesh: DeviceMesh | None) -> tuple[Search, Axes]:
    """How to search within a worker, and the axis of the workers: none or one, that of the plan if there is one."""
    if mesh is None:
        if plan is not None and plan.workers:
            raise PlanError(f"the plan is one of workers {dict(plan.workers)}; pass a mesh that has this axis")
        if exact_roles(search.roles) != search.roles:
            raise ValueError(f"roles={search.roles} has workers, and mesh=None is one device; pass a mesh")
        return search, ()
    if plan is None:
        workers, _, inner = search.of_worker(axes_of(mesh))
        return inner, workers
    return replace(search, roles=exact_roles(search.roles)), plan.workers


def _mesh_context(
    mesh: DeviceMesh, plan: Plan | None, search: Search, timeout: float, workers: Axes, role: str
) -> MeshContext:
    """This rank's context; where a plan or the pins put stages on a factor of an axis, that is an axis of its own."""
    axes = axes_of(mesh)
    if workers:
        return _worker_context(mesh, timeout, workers, role)
    context = mesh_context(mesh, timeout)
    wanted = plan.axes if plan is not None else split_for_stages(search, axes)
    wanted = wanted if is_split_for_stages(wanted, axes) else context.axes
    # Before `with_axes`: making process groups is a collective, which hangs where ranks ask for different ones.
    context.agree(wanted, "the axes of the mesh", "pass the same plan= or search= on every rank")
    if wanted != context.axes and not context.spans_world:
        raise ValueError(
            f"stages on a factor of an axis of the mesh {axes} make it {dict(wanted)}, and a mesh of several axes must "
            f"span the world of {dist.get_world_size()} ranks; ask for as many stages as an axis has"
        )
    return with_axes(context, wanted)


def _worker_context(mesh: DeviceMesh, timeout: float, workers: Axes, role: str) -> MeshContext:
    """This rank's context within its worker.

    Raises:
        PlanError: a plan has workers along an axis that is not the mesh's outermost one.
    """
    axes = axes_of(mesh)
    if workers != tuple(axes.items())[:1]:
        raise PlanError(
            f"the plan is for workers {dict(workers)} along the outermost axis, and the mesh has {axes}; plan again "
            "with axes= of the mesh"
        )
    return worker_context(mesh, timeout, role)


def _check_plan(plan: Plan, context: MeshContext) -> None:
    if plan.axes != context.axes:
        raise PlanError(
            f"the plan is for axes {dict(plan.axes)} and the mesh has {dict(context.axes)}; plan again with "
            "axes= of the mesh, or name the mesh's dims (mesh_dim_names=) as in the plan"
        )
