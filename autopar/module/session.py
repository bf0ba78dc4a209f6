"""`Session`: the state and logic of a `ParallelModule`: from a call to a step, in agreement with the other ranks."""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autopar._torch_compat import forget_fake_results, new_fake_results, without_trackers, without_users_modes
from autopar.capture.export import LONGEST_WAIT
from autopar.capture.state.hooks import refuse_hooks_of_all_modules
from autopar.capture.state.slots import Slots
from autopar.errors import AutoparError, PlanError
from autopar.ir.layout import replicated
from autopar.ir.ops.float8.histories import register_missing
from autopar.ir.ops.random import derive_seed, step_seed
from autopar.ir.plan import Plan
from autopar.ir.signature import binding, pytree
from autopar.module.added_parameters import take_added
from autopar.module.call.batch_rows import (
    as_it_will_be_passed,
    data_rank,
    part_of_rank,
    request_of_call,
    request_of_example,
)
from autopar.module.call.check_first import check_once
from autopar.module.call.evaluated_first import decide_for_training
from autopar.module.call.put_forward import call_own
from autopar.module.call.python_state import make_state_whole, whole_with_history, write_state
from autopar.module.call.traced_outside import not_exported, refuse_tracers
from autopar.module.call.worker_batch import compare_among_workers, own_part, split_among
from autopar.module.metrics import Meter
from autopar.module.specialization_cache import SpecializationCache
from autopar.module.unread_parameters import UnreadParameters
from autopar.runtime.agreement.control import Control
from autopar.runtime.agreement.points import FAILURES, NO_SYNC, STEPS, WAITING, Details, described
from autopar.runtime.agreement.same_program import require_same_contents
from autopar.runtime.dtensor import Placements, plain_type, to_local, to_placements
from autopar.runtime.mesh import MeshContext
from autopar.runtime.state.materialize import Init, materialize, uninitialized
from autopar.runtime.state.optimizer_layouts import lay_out_states_of
from autopar.runtime.state.optimizer_offload import OffloadedStates
from autopar.runtime.state.optimizer_offload import offload_states as offload
from autopar.runtime.state.parameters import checksum, contents, slice_replicated
from autopar.runtime.state.storage import refuse_foreign_parameters
from autopar.runtime.step.autograd import Call, Noted, require_unwritten, run
from autopar.runtime.step.input_gradients import input_forms
from autopar.runtime.step.no_sync import DeferredReduction
from autopar.search.pipeline.space import along_with, without_pipeline
from autopar.specialize import (
    CompileOptions,
    Request,
    Specialization,
    specialize,
)

MANY = 4
"""States of the model for which a graph has been captured when that is worth a warning."""

logger = logging.getLogger("autopar")


class _Ready(NamedTuple):
    """A call that can run: its graphs, what it is given, and the state that it may write, as it was before."""

    found: Specialization
    call: Call
    before: dict[str, torch.Tensor]
    parameters: list[Any]
    passed: list[torch.Tensor]
    skeleton: Any


class Session:
    """A model on a mesh.

    Attributes:
        original: the user's model, with parameters on the mesh.
        context: this rank's mesh context.
        options: what the user asked for.
        init: of parameters on the meta device.
        unread: parameters that no graph has read.
        slots: the Python state of the model.
        cache: specializations.
        uncompared: keys of specializations for which ranks have not compared their batches yet.
        compare_always: whether ranks compare each batch, and not only the first of each specialization.
        checked: modes that have been verified.
        compared_among_workers: whether workers that train apart have compared the batch of the first call.
        first: the specialization that decided the layouts of the parameters.
        latest: the one that ran last.
        deferred: gradients whose reduction `no_sync` has deferred.
        random_calls: how many calls drew random numbers.
        forwards: calls of the module's own forward, which one that is put in its place may leave out.
        apart: of the latest call, results that eager mode has in memory of others.
        running: calls that are under way of one that is in the original's place.
        own_forward: what the original had in that place before; None: its class's.
        number: among the parallel modules of the mesh.
        steps_before: how many steps of optimizers there had been on the mesh when this was made.
        described: the key of the latest call, in words.
        offloaded: optimizer state in host memory.
        family: this and its copies.
        meters: count what is computed.
        one: held by the thread that plans a call, or takes down what the call has left; steps run beside each other.
    """

    def __init__(self, model: nn.Module, context: MeshContext, options: CompileOptions, init: Init | None) -> None:
        self.original, self.context, self.options, self.init = model, context, options, init
        self.unread = UnreadParameters()
        self.slots = Slots(model, whole_with_history if context.mesh is not None else None)
        self.cache = SpecializationCache()
        self.uncompared: set[Any] = set()
        self.compare_always = False
        self.checked: set[Any] = set()
        self.compared_among_workers = False
        self.first: Specialization | None = None
        self.latest: Specialization | None = None
        self.deferred = DeferredReduction(model.named_parameters)
        self.random_calls, self.number, self.steps_before = 0, 0, 0
        self.forwards, self.running = 0, 0
        self.apart: Noted = []
        self.own_forward: Any = None
        if context.control is not None:
            self.number = len(context.control.calls)
            context.control.calls.append(0)
            self.steps_before = context.control.steps
        self.described: dict[Any, Details] = {}
        self.offloaded: OffloadedStates | None = None
        # Weak: an averaged copy that nobody uses any more must not live on for its original.
        self.family: list[weakref.ref[Session]] = [weakref.ref(self)]
        self.meters: list[Meter] = []
        self.one = threading.RLock()

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Of the module: what the original returns."""
        if self.running:
            return call_own(self, args, kwargs)
        self._refuse_copied()
        self.forwards += 1
        # Under torch.compile around the model: the step has graphs of its own, and what chooses one cannot be traced.
        call = self.call
        if torch.compiler.is_compiling():
            if torch.compiler.is_exporting():
                raise not_exported("torch.export")
            call = torch.compiler.disable(call)  # type: ignore[no-untyped-call]
        return call(args, kwargs)

    def _refuse_copied(self) -> None:
        if any(s is not None and s.running for s in (member() for member in self.family)):
            raise AutoparError(
                f"the forward that was put on {self.name} calls that of the module which it was put on, and runs for a "
                "copy of it, whose parameters are others: put it on the copy itself"
            )

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the original returns: scalars plain, other tensors as DTensors."""
        with self.context.telling_workers(f"a forward pass of {self.name}"):
            return self._call(args, kwargs)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        refuse_tracers()
        refuse_hooks_of_all_modules()
        with self.alone():
            ready = self._ready(args, kwargs)
        found, call = ready.found, ready.call
        # Collectives of two calls must not come between each other.
        beside = contextlib.nullcontext() if self.context.mesh is None else self.alone()
        with beside, self._random_numbers(found):
            results = run(call, ready.parameters, ready.passed)
        with self.alone():
            self.apart = call.apart
            for meter in self.meters if found.step.trains else ():
                meter.called(found)
            write_state(self, found, results, {n: b for n, b in call.buffers.items() if b is not ready.before[n]})
        return pytree.unflatten(found.program.skeleton, results, ready.skeleton.numbers)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """One thread at a time: a capture puts other tensors in the place of the model's parameters."""
        if not self.one.acquire(timeout=LONGEST_WAIT):
            raise AutoparError(
                f"another thread has been planning a call of {self.name} for {LONGEST_WAIT:g} s, and one thread plans "
                "at a time: call `specialize` before threads call it"
            )
        try:
            yield
        finally:
            self.one.release()

    def _ready(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Ready:
        """A call with its graphs, on which all ranks have agreed."""
        apart, self.apart = self.apart, []
        require_unwritten(apart)
        tensors, skeleton = binding.flatten(self.original, binding.Passed(args, kwargs))
        whole, tensors = tensors, own_part(tensors, self.context, self.options.inputs)
        # Of now: what follows asks for it until the user's code may have run.
        inventory = self.slots.inventory()
        if "taken" not in inventory.memo:
            inventory.memo["taken"] = True
            if take_added(self.original, inventory.parameters, self.types(), self.context):
                self.slots.inventory()
        make_state_whole(self)
        request = request_of_call(self, tensors, skeleton, split_among(whole, self.context, self.options.inputs))
        if self.first is None:
            decide_for_training(self, request)
        key = self._key(request)
        self._refuse_foreign_parameters()
        # All ranks agree on the call first: one that has no graph for it would wait, in capturing, for those that have.
        name, known = self._agreed("forward", key, request)
        if not self.compared_among_workers:
            compare_among_workers(whole, self.context, self.options.inputs)
            self.compared_among_workers = True
        found = self._specialized(request, key, known)
        self._compare_contents(key, tensors)
        check_once(self, found, request, tensors)
        step = found.step
        for meter in self.meters:
            meter.calling()
        named = self.slots.inventory(compare=known is None).parameters
        # The step writes into these in place; where the model assigns a new tensor, it replaces the entry.
        before = {**self.slots.state_tensors(), **{n: to_local(named[n]) for n in found.written}}
        buffers = dict(before)
        with self.context.during(f"the batch of {name}"):
            batch = part_of_rank(self, found, request, tensors, buffers)
        passed = input_forms(tensors, request.differentiable, self.options.inputs)
        call = Call(step, buffers, batch, tensors, self.deferred, name, passed)
        given = [named[n] for n in step.parameters], [tensors[int(i)] for i in passed]
        return _Ready(found, call, before, *given, skeleton)

    def specialize(self, batch: Any) -> None:
        """Decide layouts and build the graphs for a global batch (real, fake or meta tensors) before the first call."""
        with self.alone():
            request = request_of_example(self, batch)
            own = own_part(binding.flatten(self.original, batch)[0], self.context, "global")
            check_once(self, self.specialize_request(request), request, own)

    def specialize_request(self, request: Request) -> Specialization:
        """Build the graphs for a call with whole tensors, unless there are some; a collective call."""
        request = as_it_will_be_passed(self, request)
        self.slots.inventory()
        key = self._key(request)
        _, known = self._agreed("specialize()", key, request)
        return self._specialized(request, key, known, ahead=True)

    @property
    def plan(self) -> Plan:
        """The plan of the parameters' layouts: that of the first specialization."""
        if self.first is None and self.options.plan is not None:
            return self.options.plan
        return self.known(self.first).plan

    def _refuse_foreign_parameters(self) -> None:
        """Once for parameters that are the same, and of the same shapes."""
        inventory = self.slots.inventory(compare=False)
        # Objects that are new when anything of them is; kept, so that no other can have their identity.
        known, now = inventory.memo.get("not foreign", (None, None)), (self.first, inventory.memo["of a key"])
        if known[0] is not now[0] or known[1] is not now[1]:
            refuse_foreign_parameters(inventory.parameters, self.context, self.types().get)
            inventory.memo["not foreign"] = now

    def _agreed(self, what: str, key: Any, request: Request) -> tuple[str, Specialization | None]:
        """The name of a call on which all ranks agree, before its first collective, and the graph that is known for it.

        Raises:
            RankError: one is about to make another, or none.
        """
        control, found = self.context.control, self.cache.find(key, request.skeleton.numbers, self.slots)
        if control is None:
            return "", found
        # The number of the call is part of its name: so a rank that has skipped a call is noticed.
        control.calls[self.number] += what == "forward"
        name = f"call {control.calls[self.number]} of {self.name}"
        if key not in self.described:
            self.described = {key: described(key)}  # of the latest key alone: texts are long
        window = ((NO_SYNC, str(self.deferred.active)), (WAITING, self.deferred.described()))
        graph = ("what it is captured for", self.cache.which(found, key, self.slots))
        before = (FAILURES, control.failures()), self._steps(control)
        self.context.meet(f"{what} of {name}", (*self.described[key], graph, *window, *before))
        return name, found

    def _steps(self, control: Control) -> tuple[str, str]:
        """How many optimizer steps there have been since this was made: others before it are no matter of this one."""
        return STEPS, str(control.steps - self.steps_before)

    @property
    def name(self) -> str:
        """What messages call the module."""
        return f"{type(self.original).__name__}" + (f" (module {self.number})" if self.number else "")

    @contextlib.contextmanager
    def together(self, what: str) -> Iterator[None]:
        """A collective call that all ranks make."""
        control = self.context.control
        if control is not None:
            what = f"{what} after call {control.calls[self.number]} of {self.name}"
            self.context.meet(what, ((WAITING, self.deferred.described()), self._steps(control)))
        with self.context.during(what):
            yield

    def _random_numbers(self, found: Specialization) -> AbstractContextManager[None]:
        """New random numbers for one call, the same on every rank that computes the same."""
        if found.seed is None:
            return contextlib.nullcontext()
        self.random_calls += 1
        return step_seed(derive_seed(found.seed, self.random_calls))

    def _specialized(
        self, request: Request, key: Any, known: Specialization | None, *, ahead: bool = False
    ) -> Specialization:
        if known is not None:
            self.latest = known
            return known
        others = self.cache.of(key)
        if changed := self.cache.changed(key, self.slots):
            log = logger.warning if len(others) == MANY else logger.info
            log("recapturing the model: %s changed since the last call", ", ".join(changed[:3]))
        first = self.first is None
        if first and self.context.mesh is not None:
            _require_parameters(self.original)
        placements = None if first else self.placements()
        # Later, ranks hold shards, whose checksums differ.
        weights = checksum(dict(self.original.named_parameters())) if first else ""
        options = self.options
        if self.first is not None:
            # Parameters are on their stages already: a further plan must have the same stages.
            search = without_pipeline(options.search)
            search = replace(search, pins={**search.pins, **along_with(self.first.plan)})
            options = replace(options, search=search)
        # Taken before the capture, which runs the model's Python code; whether constants count, the program says after.
        states = {c: self.slots.signature(c) for c in (False, True)}
        # Whoever plans ahead can wait for a search of all plans; a call cannot.
        before = None if ahead else self.first
        # The user's modes see what a step computes, as they do in eager mode, and not how it is planned.
        with (
            options.observer.specializing(), without_users_modes(), without_trackers(), new_fake_results() as results,
        ):  # fmt: skip
            found = specialize(
                self.original, request, options, self.context,
                placements=placements, weights=weights, known=others, before=before,
                unread=frozenset() if first else self.unread.names(self.original, self.context),
            )  # fmt: skip
        weakref.finalize(found, forget_fake_results, results).atexit = False
        program = found.program
        named = zip(program.inputs, program.placeholders, strict=True)
        buffers = {i.name: n.meta["val"] for i, n in named if i.kind == "buffer"}
        lacking = register_missing(self.original, buffers, self.context.device)
        if self.slots.compute(program.state.computing) or lacking:
            # The capture has found out whose state counts, and which float8 layers there are, and left it as it was.
            states = {c: self.slots.signature(c) for c in (False, True)}
        if first:
            options.observer.planned(found.plan)
        # Copies that were made before get the same layouts: averages of weights combine their parameters.
        for member in [m() for m in self.family] if first else ():
            if member is not None:
                member.decide(found)
        self.unread.read_by(found, self.original)
        self.cache.add(key, found, states[found.program.state.constants])
        self.latest = found
        self.uncompared.add(key)
        return found

    def _compare_contents(self, key: Any, tensors: list[torch.Tensor]) -> None:
        """Before the first step of a specialization: ranks that take the same part must be given the same batch."""
        # Once, not in every step: it hashes the whole batch, and a mistake of a sampler shows in the first.
        always = self.compare_always and self.context.mesh is not None
        if always or (self.uncompared and key in self.uncompared):
            plain = [t for t in tensors if not isinstance(t, DTensor)]
            part = 0 if self.options.inputs == "global" else data_rank(self)
            require_same_contents(contents(plain), part, self.context)
            self.uncompared.discard(key)

    def _key(self, request: Request) -> Any:
        """What the graphs of a call depend on, but for floats and Python state: see `SpecializationCache`."""
        device, inventory = self.context.device.type, self.slots.inventory(compare=False)
        modes = inventory.modes  # users may replace modules
        facts = inventory.facts()
        if inventory.memo.get("facts") != facts:
            parameters = tuple((n, *own) for n, own in zip(inventory.parameters, facts, strict=True))
            inventory.memo |= {"facts": facts, "of a key": parameters}
        autocast = (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
        layouts = tuple(sorted((i, str(p)) for i, p in request.layouts.items()))
        # A graph has a tensor under one name: names that stand for one no more need another graph.
        required = inventory.memo["of a key"], self.slots.shared(), request.differentiable
        return request.shapes, repr(request.skeleton), layouts, modes, torch.is_grad_enabled(), *required, autocast

    def placements(self) -> dict[str, Placements]:
        """Of each parameter, as it is now."""
        plain = to_placements(plain_type((), torch.float32), replicated(len(self.context.axes)))
        return {
            n: tuple(p.placements) if isinstance(p, DTensor) else plain for n, p in self.original.named_parameters()
        }

    def decide(self, found: Specialization) -> None:
        """Lay out the parameters as a specialization has them, unless that has been done."""
        if self.first is not None:
            return
        # The plan may have split an axis of the mesh: from here on all is on the finer one.
        self.context, self.first = found.context, found
        types, named = found.step.types.parameters, dict(self.original.named_parameters())
        for name, parameter in named.items():
            # No communication: until now every rank has the whole tensor.
            if not to_local(parameter).is_meta and name in types:
                slice_replicated(parameter, *types[name], self.context)
        materialize(self.original, self.init, types, found.program.aliases, self.context)
        self.offload_states()
        if self.context.mesh is not None:
            lay_out_states_of(named.values())

    def offload_states(self) -> None:
        """Keep optimizer state in host memory where the plan says so."""
        names = () if self.first is None else self.first.offloaded_states
        named = dict(self.original.named_parameters())
        self.offloaded = offload([named[name] for name in names]) if names else None

    def types(self) -> Any:
        """Type and layout of each parameter; empty before they are decided."""
        return {} if self.first is None else {**self.first.step.types.parameters, **self.unread.moved}

    def require_values(self) -> None:
        """Refuse what needs values while some parameter is on the meta device."""
        missing = uninitialized(self.original)
        if missing:
            raise AutoparError(f"{missing[0]!r} is on the meta device and has no values; pass init= to parallelize()")

    def known(self, found: Specialization | None) -> Specialization:
        """A specialization that must be there by now."""
        if found is None:
            raise PlanError(
                "there is no plan yet: call the model once, or pass batch= (an example of the global batch) or plan= "
                'to parallelize(); inputs="local" needs that, since the plan decides how a batch is split'
            )
        return found


def _require_parameters(model: nn.Module) -> None:
    """Refuse a first call with other tensors in place of parameters, which layouts would be decided for.

    Raises:
        AutoparError: there is one.
    """
    other = next((n for n, p in model.named_parameters() if not isinstance(p, nn.Parameter)), None)
    if other is not None:
        raise AutoparError(
            f"the first call of the model has a computed tensor in place of parameter {other!r}, as under "
            "torch.func.functional_call, and would decide the layout of that: pass batch= (an example of the global "
            "batch) to parallelize(), or call the model once before"
        )
