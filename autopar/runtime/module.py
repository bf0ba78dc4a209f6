"""`ParallelModule`: the model that the user trains, on a mesh."""

from __future__ import annotations

import contextlib
import inspect
import logging
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn
from torch.distributed.tensor import DTensor

from autopar import binding, tree
from autopar._torch_compat import FakeTensor
from autopar.capture.hooks import replay
from autopar.capture.slots import OWN as TORCHS
from autopar.capture.slots import Slots, state_tensors
from autopar.capture.writes import apply
from autopar.draw import derive_seed, step_seed
from autopar.errors import AutoparError, PlanError
from autopar.layout import Layout, Replicate, Split, replicated
from autopar.pipeline.asked import along_with, without_pipeline
from autopar.plan import Plan
from autopar.runtime.boundary import Placements, from_local, full_tensor, part_of, plain_type, to_local, to_placements
from autopar.runtime.check_first import check_first
from autopar.runtime.copies import RESIZING, SAVING, deep_copy, on_a_mesh, refuse_pickling, shallow_copy
from autopar.runtime.input_gradients import origins, requiring_gradients
from autopar.runtime.kept import Kept
from autopar.runtime.load import load_full, prepare_load, savable
from autopar.runtime.materialise import Init, materialise, uninitialised
from autopar.runtime.microbatches import MicrobatchStep
from autopar.runtime.offload_states import OffloadedStates, offload_states
from autopar.runtime.optimizer_states import lay_out_states_of
from autopar.runtime.place import Place
from autopar.runtime.points import FAILURES, NO_SYNC, WAITING, Details, described
from autopar.runtime.postpone import Postponed
from autopar.runtime.specialise import (
    Request,
    Settings,
    Specialisation,
    compare_contents,
    data_layout,
    data_parts,
    specialise,
)
from autopar.runtime.state import checksum, contents, gathered, slice_replicated
from autopar.runtime.step import Call, deliver, reduce_postponed, run
from autopar.runtime.stored import load_into, refuse_strangers

MANY = 4
"""States of the model for which a graph has been captured when that is worth a warning."""

logger = logging.getLogger("autopar")

_OWN = (
    "_original", "_place", "_settings", "_init", "_cache", "_unseen", "_first", "_latest", "_postponed", "_drawn",
    "_number", "_described", "_away", "_family", "_checked", "_slots", "_state_dict_hooks",
    "_load_state_dict_pre_hooks",
)  # fmt: skip


class ParallelModule(nn.Module):
    """A model whose parameters lie on a mesh and whose steps run as rewritten graphs.

    Parameters are `DTensor`s under the original names (plain tensors where there is no mesh), so optimizers, clipping
    and state dicts work as usual. The first call decides how they lie, unless `autopar.parallelize` was given a batch.
    """

    def __init__(self, model: nn.Module, place: Place, settings: Settings, init: Init | None) -> None:
        """Torch's tables, hooks included, are the original's own; so is every attribute but those of ``_OWN``."""
        self.__dict__.update({name: table for name, table in vars(model).items() if name in TORCHS})
        for name in ("_state_dict_hooks", "_load_state_dict_pre_hooks"):
            self.__dict__[name] = OrderedDict(self.__dict__[name])
        self.__dict__["_original"] = model
        self._slots = Slots(model)
        self._place, self._settings, self._init = place, settings, init
        self._cache = Kept()
        self._unseen: set[Any] = set()
        self._checked: set[Any] = set()
        self._first: Specialisation | None = None
        self._latest: Specialisation | None = None
        self._postponed = Postponed(self.named_parameters)
        self._drawn, self._number = 0, 0
        if place.control is not None:
            self._number = len(place.control.calls)
            place.control.calls.append(0)
        self._described: dict[Any, Details] = {}
        self._away: OffloadedStates | None = None
        self._family: list[weakref.ref[ParallelModule]] = [weakref.ref(self)]
        self.register_state_dict_post_hook(_save_hook)  # type: ignore[no-untyped-call]
        hooks: Any = self._state_dict_hooks
        hooks.move_to_end(next(reversed(hooks)), last=False)  # before the model's own change names
        self.register_load_state_dict_pre_hook(_load_hook)  # type: ignore[no-untyped-call]
        for module in model.modules() if place.mesh is not None else ():
            module.register_load_state_dict_pre_hook(load_into)  # type: ignore[no-untyped-call]

    def __getattr__(self, name: str) -> Any:
        """Attributes of the original model, such as ``config``."""
        if name in _OWN or "_original" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.__dict__["_original"], name)

    def __deepcopy__(self, memo: dict[int, Any]) -> ParallelModule:
        """Of its own tensors, for averages of weights."""
        return deep_copy(self, memo)

    def __copy__(self) -> ParallelModule:
        """With the same tensors."""
        return shallow_copy(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """An error that says how to save a model."""
        return refuse_pickling()

    def __setattr__(self, name: str, value: Any) -> None:
        """Attributes are the original's, so that its forward sees what is set here."""
        if name in _OWN or isinstance(getattr(type(self), name, None), property):
            object.__setattr__(self, name, value)
        else:
            setattr(self.__dict__["_original"], name, value)

    def __delattr__(self, name: str) -> None:
        """As for setting."""
        if name in _OWN:
            object.__delattr__(self, name)
        else:
            delattr(self.__dict__["_original"], name)

    @property
    def training(self) -> bool:
        """The original's mode; the next call specialises for it if it has not yet."""
        found: bool = self.__dict__["_original"].training
        return found

    @training.setter
    def training(self, mode: bool) -> None:
        self.__dict__["_original"].training = mode

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As the original. Hooks of modules inside are part of the graphs; so are its own where ``loss_fn`` is."""
        if self._settings.loss_fn is not None:
            return self.forward(*args, **kwargs)
        return nn.Module.__call__(self, *args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the original returns: scalars plain, other tensors as DTensors."""
        tensors, skeleton = binding.flatten(self._original, binding.Passed(args, kwargs))
        refuse_strangers(self._original, self._place, self._types().get)
        request = self._request(tensors, skeleton)
        name = self._agreed("forward", request)
        found = self._specialised(request)
        self._compare_contents(request, tensors)
        self._check(found, request, tensors)
        step = found.step
        named = dict(self.named_parameters())
        before = {**state_tensors(self._original), **{n: to_local(named[n]) for n in found.written}}
        buffers = dict(before)
        with self._place.during(f"the batch of {name}"):
            batch = [
                part_of(t, *step.types.batch[str(i)], self._place) if self._is_whole(t) else to_local(t).contiguous()
                for i, t in enumerate(tensors) if str(i) in step.types.batch
            ]  # fmt: skip
            if isinstance(step, MicrobatchStep):
                batch += step.before([self._gatherable(t, request, i) for i, t in enumerate(tensors)], buffers)
        given = origins(tensors, request.differentiable, self._settings.inputs)
        call = Call(step, buffers, [t.to(self._place.device) for t in batch], self._postponed, name, given)
        with self._random_numbers(found):
            results = run(call, [named[n] for n in step.parameters], [tensors[int(o.name)] for o in given])
        self._write_state(found, results, {n: b for n, b in buffers.items() if b is not before[n]})
        return tree.unflatten(found.program.skeleton, results, skeleton.numbers)

    def _write_state(self, found: Specialisation, results: list[Any], assigned: dict[str, torch.Tensor]) -> None:
        """Do to the original what its forward did to it while it was traced."""
        state = found.program.state
        for name, value in assigned.items():
            path, _, attribute = name.rpartition(".")
            self._original.get_submodule(path)._buffers[attribute] = value
        whole = _Whole(results)
        for check in state.checks:
            check.make(whole)
        apply(self._original, state.writes, whole)
        replay(self._original, state.observed, whole)

    def specialise(self, batch: Any) -> None:
        """Decide layouts and build the graphs for a global batch (real, fake or meta tensors) before the first call."""
        tensors, skeleton = binding.flatten(self._original, batch)
        shapes = tuple((tuple(t.shape), t.dtype) for t in tensors)
        request = Request(skeleton, shapes, {}, differentiable=requiring_gradients(tensors))
        self._agreed("specialise()", request)
        self._check(self._specialised(request), request, tensors)

    @property
    def plan(self) -> Plan:
        """The plan of the parameters' layouts: that of the first specialisation."""
        if self._first is None and self._settings.plan is not None:
            return self._settings.plan
        return self._known(self._first).plan

    @property
    def logical_graph(self) -> fx.GraphModule:
        """The latest specialisation's graph on global tensors, with layouts."""
        found = self._known(self._latest)
        return self._settings.toolchain.annotate(found.program, found.plan).graph

    @property
    def forward_graph(self) -> fx.GraphModule:
        """The latest specialisation's forward graph on this rank's tensors."""
        return self._known(self._latest).step.cut.forward

    @property
    def backward_graph(self) -> fx.GraphModule | None:
        """Its backward graph; None if it does not train."""
        return self._known(self._latest).step.cut.backward

    @property
    def steady_graph(self) -> fx.GraphModule | None:
        """What runs before its first microbatch, for all of them; None if nothing does."""
        return self._known(self._latest).step.cut.steady

    @property
    def data_world_size(self) -> int:
        """Into how many parts the rows of a batch are split: ``num_replicas`` of a sampler."""
        return data_parts(self._rows(), self._place.sizes)

    @property
    def data_rank(self) -> int:
        """Which part this rank takes: ``rank`` of a sampler."""
        index = 0
        for placement, n, coordinate in zip(self._rows(), self._place.sizes, self._place.coordinates, strict=True):
            index = index * n + coordinate if placement == Split(0, 0) else index
        return index

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """Plain tensors by original name, as one device would hold them; a collective call."""
        self._require_values()
        with self._together("full_state_dict()"):
            return gathered(nn.Module.state_dict(_Unhooked(self), keep_vars=True), self._types(), self._place)

    def load_full_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take values from plain full tensors; every rank keeps its part.

        Raises:
            AutoparError: names are missing or unexpected, or a shape differs; nothing is changed then.
        """
        own = dict(nn.Module.state_dict(_Unhooked(self), keep_vars=True))
        with self._place.during("load_full_state_dict()", in_step=False):
            load_full(self, own, state, self._place, self._types())

    def full_gradients(self) -> dict[str, torch.Tensor]:
        """Plain gradients by original name, of parameters that have one; a collective call."""
        self._postponed.refuse(self.parameters(), "full_gradients()")
        found = {n: p.grad for n, p in self.named_parameters() if p.grad is not None}
        with self._together("full_gradients()"):
            return gathered(found, self._types(), self._place)

    def explain(self, name: str) -> str:
        """Why a parameter lies as it does; what of a module, or an operator, is kept or made again, and why."""
        from autopar.runtime.explain import explain

        return explain(self._known(self._first), name)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes within leave gradients unreduced; the next one outside reduces the sum, once.

        Until then ``.grad`` lacks them, and an optimizer's step is an error. ``zero_grad`` drops them.
        """
        before, self._postponed.active = self._postponed.active, True
        try:
            yield
        finally:
            self._postponed.active = before

    def reduce_gradients(self) -> None:
        """Reduce gradients that wait since `no_sync`, where no backward pass outside follows; a collective call."""
        with self._together("reduce_gradients()"):
            deliver(reduce_postponed(self._postponed), self._postponed, self._place)

    def _agreed(self, what: str, request: Request) -> str:
        """The name of a call on which all ranks agree, before its first collective.

        Raises:
            RankError: one is about to make another, or none.
        """
        control = self._place.control
        if control is None:
            return ""
        control.calls[self._number] += what == "forward"
        name = f"call {control.calls[self._number]} of {self._name}"
        key = self._key(request)
        if key not in self._described:
            self._described = {key: described(key)}  # of one kind at a time: texts are long
        window = ((NO_SYNC, str(self._postponed.active)), (WAITING, self._postponed.described()))
        known = ("what it is captured for", self._cache.which(key, request.skeleton.numbers, self._slots))
        self._place.meet(f"{what} of {name}", (*self._described[key], known, *window, (FAILURES, control.failures())))
        return name

    @property
    def _name(self) -> str:
        """What messages call the module."""
        return f"{type(self._original).__name__}" + (f" (module {self._number})" if self._number else "")

    @contextlib.contextmanager
    def _together(self, what: str) -> Iterator[None]:
        """A collective call that all ranks make."""
        control = self._place.control
        what = what if control is None else f"{what} behind call {control.calls[self._number]} of {self._name}"
        self._place.meet(what, ((WAITING, self._postponed.described()),))
        with self._place.during(what):
            yield

    def _random_numbers(self, found: Specialisation) -> AbstractContextManager[None]:
        """New random numbers for one call, the same on every rank that computes the same."""
        if found.seed is None:
            return contextlib.nullcontext()
        self._drawn += 1
        return step_seed(derive_seed(found.seed, self._drawn))

    def _is_whole(self, tensor: torch.Tensor) -> bool:
        return self._settings.inputs == "global" or isinstance(tensor, DTensor)

    def _gatherable(self, tensor: torch.Tensor, request: Request, index: int) -> torch.Tensor:
        """A batch tensor that is whole, or a DTensor."""
        if self._is_whole(tensor):
            return tensor
        shape, dtype = request.shapes[index]
        placements = to_placements(plain_type(shape, dtype), request.rows[index])
        return from_local(tensor.to(self._place.device), self._place, shape, placements)

    def _request(self, tensors: list[torch.Tensor], skeleton: Any) -> Request:
        shapes, rows = [], {}
        for i, t in enumerate(tensors):
            shape = tuple(t.shape)
            if not self._is_whole(t):
                split = bool(shape) and self._splits(i, len(tensors))
                shape = (shape[0] * self.data_world_size, *shape[1:]) if split else shape
                rows[i] = self._rows() if split else replicated(len(self._place.axes))
            shapes.append((shape, t.dtype))
        layouts = {i: tuple(t.placements) for i, t in enumerate(tensors) if isinstance(t, DTensor)}
        return Request(skeleton, tuple(shapes), layouts, rows, requiring_gradients(tensors))

    def _splits(self, index: int, count: int) -> bool:
        """Whether ranks pass different rows of this batch tensor; position ids of one row, for example, are alike."""
        layouts = self.plan.batch
        if len(layouts) != count or str(index) not in layouts:
            return True
        return any(p == Split(0, 0) for p in layouts[str(index)])

    def _specialised(self, request: Request) -> Specialisation:
        key = self._key(request)
        known = self._cache.find(key, request.skeleton.numbers, self._slots)
        if known is not None:
            self._latest = known
            return known
        others = self._cache.of(key)
        if changed := self._cache.changed(key, self._slots):
            log = logger.warning if len(others) == MANY else logger.info
            log("capturing the model again: %s changed since the last call", ", ".join(changed[:3]))
        first = self._first is None
        placements = None if first else self._placements()
        weights = checksum(dict(self.named_parameters())) if first else ""
        settings = self._settings
        if self._first is not None:
            search = without_pipeline(settings.search)
            search = replace(search, pins={**search.pins, **along_with(self._first.plan)})
            settings = replace(settings, search=search)
        states = {c: self._slots.signature(c) for c in (False, True)}
        found = specialise(
            self._original, request, settings, self._place,
            placements=placements, weights=weights, known=others,
        )  # fmt: skip
        for member in [m() for m in self._family] if first else ():  # copies made before go on like this one
            if member is not None:
                member._decide(found)
        self._cache.add(key, found, states[found.program.state.constants])
        self._latest = found
        self._unseen.add(key)
        return found

    def _compare_contents(self, request: Request, tensors: list[torch.Tensor]) -> None:
        """Before the first batch of a kind: ranks that take the same part must be given the same."""
        if not self._unseen:
            return
        key = self._key(request)
        if key in self._unseen:
            plain = [t for t in tensors if not isinstance(t, DTensor)]
            part = 0 if self._settings.inputs == "global" else self.data_rank
            compare_contents(contents(plain), part, self._place)
            self._unseen.remove(key)

    def _check(self, found: Specialisation, request: Request, tensors: list[torch.Tensor]) -> None:
        """With ``check=True``, before the first step of a mode: the plan must compute what the model does."""
        grads = torch.is_grad_enabled(), request.differentiable
        mode = (tuple(m.training for m in self.modules()), grads, repr(request.skeleton))
        if self._settings.require_equal is None or mode in self._checked:
            return
        if uninitialised(self._original) or any(t.is_meta or isinstance(t, FakeTensor) for t in tensors):
            return  # an example without values: the first call checks
        self._checked.add(mode)
        given = [
            t if t.shape == request.shapes[i][0] else self._gatherable(t, request, i) for i, t in enumerate(tensors)
        ]
        whole = [full_tensor(t).requires_grad_(i in request.differentiable) for i, t in enumerate(given)]
        check_first(self._original, found, request, whole, self._settings, self._types(), self._placements())

    def _key(self, request: Request) -> Any:
        device = self._place.device.type
        modes = tuple((type(m), m.training) for m in self.modules())  # which may have been replaced
        parameters = tuple((n, p.requires_grad, p.dtype, p.shape) for n, p in self.named_parameters())
        autocast = (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
        layouts = tuple(sorted((i, str(p)) for i, p in request.layouts.items()))
        required = parameters, request.differentiable
        return request.shapes, repr(request.skeleton), layouts, modes, torch.is_grad_enabled(), *required, autocast

    def _placements(self) -> dict[str, Placements]:
        plain = to_placements(plain_type((), torch.float32), replicated(len(self._place.axes)))
        return {n: tuple(p.placements) if isinstance(p, DTensor) else plain for n, p in self.named_parameters()}

    def _decide(self, found: Specialisation) -> None:
        """Let the layouts of the parameters be those of a specialisation, if they are not decided yet."""
        if self._first is not None:
            return
        self._place, self._first = found.place, found
        types, named = found.step.types.parameters, dict(self.named_parameters())
        for name, parameter in named.items():  # of which each rank keeps its part
            if not to_local(parameter).is_meta and name in types:
                slice_replicated(parameter, *types[name], self._place)
        materialise(self._original, self._init, types, found.program.aliases, self._place)
        self._offload_states()
        if self._place.mesh is not None:
            lay_out_states_of(named.values())

    def _offload_states(self) -> None:
        away = () if self._first is None else self._first.states_away
        named = dict(self.named_parameters())
        self._away = offload_states([named[name] for name in away]) if away else None

    def _types(self) -> Any:
        return {} if self._first is None else self._first.step.types.parameters

    def _require_values(self) -> None:
        missing = uninitialised(self._original)
        if missing:
            raise AutoparError(f"{missing[0]!r} is on the meta device and has no values; pass init= to parallelize()")

    def _rows(self) -> Layout:
        if self._first is None:
            plan = self._known(None).plan if self._settings.plan is None else self._settings.plan
            whole = replicated(len(self._place.axes))
            found = [tuple(p if p == Split(0, 0) else Replicate() for p in v) for v in plan.batch.values()]
            return max(found, key=lambda v: data_parts(v, self._place.sizes), default=whole)
        return data_layout(self._first.program, self._first.plan)[0]

    def _known(self, found: Specialisation | None) -> Specialisation:
        if found is None:
            raise PlanError(
                "there is no plan yet: call the model once, or pass batch= (an example of the global batch) or plan= "
                'to parallelize(); inputs="local" needs that, since the plan decides how a batch is split'
            )
        return found


def parallel_module(model: nn.Module, place: Place, settings: Settings, init: Init | None) -> ParallelModule:
    """The module that runs a model on a mesh: of a class of its own, which is a subclass of the model's.

    So the model's methods and properties, special ones included, are those of the result: what they do to ``self`` is
    done to the parallel module, and ``self(...)`` runs on the mesh.
    """
    kind: Any = type(model)
    signature = inspect.signature(model.forward)

    def forward(self: ParallelModule, *args: Any, **kwargs: Any) -> Any:
        return ParallelModule.forward(self, *args, **kwargs)

    forward.__doc__ = model.forward.__doc__
    try:
        made = type(kind)(
            kind.__name__, (ParallelModule, kind),
            {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "forward": _bound(forward, signature),
             **{name: _own_method(name) for name in (*SAVING, *RESIZING) if hasattr(kind, name)}},
        )  # fmt: skip
    except TypeError:  # a class that cannot be subclassed so
        made = ParallelModule
    parallel: ParallelModule = object.__new__(made)
    ParallelModule.__init__(parallel, model, place, settings, init)
    return parallel


def _own_method(name: str) -> Callable[..., Any]:
    """A method of the model that must not run on parameters of a mesh."""

    def method(self: ParallelModule, *args: Any, **kwargs: Any) -> Any:
        found = getattr(self._original, name)
        return (found if self._place.mesh is None else on_a_mesh(self, name, found))(*args, **kwargs)

    method.__name__ = name
    return method


def _bound(forward: Callable[..., Any], signature: inspect.Signature) -> Callable[..., Any]:
    """The function with the signature of a method: the original's, and ``self`` first."""
    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    parameters = list(signature.parameters.values())
    if any(p.name == "self" for p in parameters):
        return forward
    forward.__signature__ = signature.replace(parameters=[own, *parameters])  # type: ignore[attr-defined]
    return forward


class _Whole:
    """Results as the model's attributes get them: whole tensors."""

    def __init__(self, results: list[Any]) -> None:
        self._results = results

    def __getitem__(self, index: int) -> Any:
        found = self._results[index]
        return found.full_tensor() if isinstance(found, DTensor) else found


class _Unhooked(nn.Module):
    """The same tables without the hooks."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        for table in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            self.__dict__[table] = module.__dict__[table]


def _save_hook(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    assert isinstance(module, ParallelModule)
    with module._place.during("state_dict()", in_step=False):
        for name, value in list(state.items()):
            if name.startswith(prefix) and isinstance(value, DTensor):
                state[name] = savable(value, module._types().get(name.removeprefix(prefix)), module._place)


def _load_hook(module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    assert isinstance(module, ParallelModule)
    with module._place.during("load_state_dict()", in_step=False):
        prepare_load(module, state, prefix, module._place, module._types())
