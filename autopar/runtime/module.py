"""`ParallelModule`: the model that the user trains, on a mesh."""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn
from torch.distributed.tensor import DTensor

from autopar import tree
from autopar.draw import derive_seed, step_seed
from autopar.errors import AutoparError, PlanError
from autopar.layout import Layout, Replicate, Split, replicated
from autopar.pipeline.asked import along_with, without_pipeline
from autopar.plan import Plan
from autopar.runtime.boundary import Placements, from_local, part_of, plain_type, to_local, to_placements
from autopar.runtime.copies import deep_copy, on_a_mesh, refuse_pickling, shallow_copy
from autopar.runtime.load import load_full, prepare_load, savable
from autopar.runtime.materialise import Init, materialise, uninitialised
from autopar.runtime.microbatches import MicrobatchStep
from autopar.runtime.offload_states import OffloadedStates, offload_states
from autopar.runtime.optimizer_states import lay_out_states_of
from autopar.runtime.place import Place
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
from autopar.runtime.step import Call, run
from autopar.runtime.stored import load_into, refuse_strangers

CACHED = 16
"""How many specialisations are kept."""

_OWN = (
    "_original", "_place", "_settings", "_init", "_cache", "_unseen", "_first", "_latest", "_postponed", "_drawn",
    "_away", "_family",
)  # fmt: skip


class ParallelModule(nn.Module):
    """A model whose parameters lie on a mesh and whose steps run as rewritten graphs.

    Parameters are `DTensor`s under the original names (plain tensors where there is no mesh), so optimizers, clipping
    and state dicts work as usual. The first call decides how they lie, unless `autopar.parallelize` was given a batch.
    """

    def __init__(self, model: nn.Module, place: Place, settings: Settings, init: Init | None) -> None:
        super().__init__()
        self.__dict__["_parameters"] = model._parameters
        self.__dict__["_buffers"] = model._buffers
        self.__dict__["_modules"] = model._modules
        self.__dict__["_non_persistent_buffers_set"] = model._non_persistent_buffers_set
        self.training = model.training
        self.__dict__["_original"] = model
        self._place, self._settings, self._init = place, settings, init
        self._cache: OrderedDict[Any, Specialisation] = OrderedDict()
        self._unseen: set[Any] = set()
        self._first: Specialisation | None = None
        self._latest: Specialisation | None = None
        self._postponed = Postponed()
        self._drawn = 0
        self._away: OffloadedStates | None = None
        self._family: list[weakref.ref[ParallelModule]] = [weakref.ref(self)]
        self.register_state_dict_post_hook(_save_hook)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_load_hook)  # type: ignore[no-untyped-call]
        for module in model.modules() if place.mesh is not None else ():
            module.register_load_state_dict_pre_hook(load_into)  # type: ignore[no-untyped-call]

    def __getattr__(self, name: str) -> Any:
        """Attributes of the original model, such as ``config``."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name in _OWN or name.startswith("__") or "_original" not in self.__dict__:
                raise
            found = getattr(self.__dict__["_original"], name)
            return found if self._place.mesh is None else on_a_mesh(self, name, found)

    def __deepcopy__(self, memo: dict[int, Any]) -> ParallelModule:
        """Of its own tensors, for averages of weights."""
        return deep_copy(self, memo)

    def __copy__(self) -> ParallelModule:
        """With the same tensors."""
        return shallow_copy(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """An error that says how to save a model."""
        return refuse_pickling()

    def train(self, mode: bool = True) -> ParallelModule:
        """As in `nn.Module`; the next call specialises for the mode if it has not yet."""
        super().train(mode)
        self._original.training = mode
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the original returns: scalars plain, other tensors as DTensors."""
        tensors, skeleton = tree.flatten(self._batch(args, kwargs), "batch")
        if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
            i = next(i for i, t in enumerate(tensors) if t.requires_grad)
            raise ValueError(f"batch tensor {i} requires a gradient, which is not computed: detach it")
        refuse_strangers(self._original, self._place, self._types().get)
        request = self._request(tensors, skeleton)
        found = self._specialised(request)
        self._compare_contents(request, tensors)
        step = found.step
        batch = [part_of(t, *step.types.batch[str(i)], self._place) if self._is_whole(t) else to_local(t).contiguous()
                 for i, t in enumerate(tensors) if str(i) in step.types.batch]  # fmt: skip
        named = dict(self.named_parameters())
        buffers = dict(self.named_buffers(remove_duplicate=False))
        if isinstance(step, MicrobatchStep):
            batch += step.before([self._gatherable(t, request, i) for i, t in enumerate(tensors)], buffers)
        call = Call(step, buffers, [t.to(self._place.device) for t in batch], self._postponed)
        with self._random_numbers(found):
            results = run(call, [named[n] for n in step.parameters])
        return tree.unflatten(found.program.skeleton, results)

    def specialise(self, batch: Any) -> None:
        """Decide layouts and build the graphs for a global batch (real, fake or meta tensors) before the first call."""
        tensors, skeleton = tree.flatten(batch, "batch")
        shapes = tuple((tuple(t.shape), t.dtype) for t in tensors)
        self._specialised(Request(skeleton, shapes, {}))

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
        return gathered(nn.Module.state_dict(_Unhooked(self), keep_vars=True), self._types(), self._place)

    def load_full_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take values from plain full tensors; every rank keeps its part.

        Raises:
            AutoparError: names are missing or unexpected, or a shape differs; nothing is changed then.
        """
        load_full(self, dict(nn.Module.state_dict(_Unhooked(self), keep_vars=True)), state, self._place, self._types())

    def full_gradients(self) -> dict[str, torch.Tensor]:
        """Plain gradients by original name, of parameters that have one; a collective call."""
        found = {n: p.grad for n, p in self.named_parameters() if p.grad is not None}
        return gathered(found, self._types(), self._place)

    def explain(self, name: str) -> str:
        """Why a parameter lies as it does; what of a module, or an operator, is kept or made again, and why."""
        from autopar.runtime.explain import explain

        return explain(self._known(self._first), name)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes within leave gradients unreduced; the next one outside reduces the sum, once."""
        before, self._postponed.active = self._postponed.active, True
        try:
            yield
        finally:
            self._postponed.active = before

    def _random_numbers(self, found: Specialisation) -> AbstractContextManager[None]:
        """New random numbers for one call, the same on every rank that computes the same."""
        if found.seed is None:
            return contextlib.nullcontext()
        self._drawn += 1
        return step_seed(derive_seed(found.seed, self._drawn))

    def _batch(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The batch in the form it was passed in; positional and named arguments together become named ones."""
        if not (args and kwargs):
            return kwargs or args
        return dict(inspect.signature(self._original.forward).bind(*args, **kwargs).arguments)

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
        return Request(skeleton, tuple(shapes), layouts, rows)

    def _splits(self, index: int, count: int) -> bool:
        """Whether ranks pass different rows of this batch tensor; position ids of one row, for example, are alike."""
        layouts = self.plan.batch
        if len(layouts) != count or str(index) not in layouts:
            return True
        return any(p == Split(0, 0) for p in layouts[str(index)])

    def _specialised(self, request: Request) -> Specialisation:
        key = self._key(request)
        if key in self._cache:
            self._cache.move_to_end(key)
            self._latest = self._cache[key]
            return self._latest
        first = self._first is None
        placements = None if first else self._placements()
        weights = checksum(dict(self.named_parameters())) if first else ""
        settings = self._settings
        if self._first is not None:
            search = without_pipeline(settings.search)
            search = replace(search, pins={**search.pins, **along_with(self._first.plan)})
            settings = replace(settings, search=search)
        found = specialise(self._original, request, settings, self._place, placements=placements, weights=weights)
        for member in [m() for m in self._family] if first else ():  # copies made before go on like this one
            if member is not None:
                member._decide(found)
        self._latest = self._cache[key] = found
        self._unseen.add(key)
        while len(self._cache) > CACHED:
            self._unseen.discard(self._cache.popitem(last=False)[0])
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

    def _key(self, request: Request) -> Any:
        device = self._place.device.type
        modes = tuple((type(m), m.training) for m in self.modules())  # which may have been replaced
        parameters = tuple((n, p.requires_grad, p.dtype, p.shape) for n, p in self.named_parameters())
        autocast = (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
        layouts = tuple(sorted((i, str(p)) for i, p in request.layouts.items()))
        return request.shapes, repr(request.skeleton), layouts, modes, parameters, torch.is_grad_enabled(), autocast

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


class _Unhooked(nn.Module):
    """The same tables without the hooks."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        for table in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            self.__dict__[table] = module.__dict__[table]


def _save_hook(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    assert isinstance(module, ParallelModule)
    for name, value in list(state.items()):
        if name.startswith(prefix) and isinstance(value, DTensor):
            state[name] = savable(value, module._types().get(name.removeprefix(prefix)), module._place)


def _load_hook(module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    assert isinstance(module, ParallelModule)
    prepare_load(module, state, prefix, module._place, module._types())
