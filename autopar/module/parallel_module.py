"""`ParallelModule`: the model that the user trains, on a mesh."""

from __future__ import annotations

import contextlib
import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from types import MethodType
from typing import Any

import torch
from torch import fx, nn
from torch.distributed.tensor import DTensor

from autopar.capture.state.values import OWN as TORCHS
from autopar.compiler import rewrite
from autopar.costs.arguments import TEXT, a, require
from autopar.errors import AutoparError, RankError
from autopar.ir.plan import Plan
from autopar.module.call import put_forward
from autopar.module.call.batch_rows import data_rank, data_world_size
from autopar.module.call.traced_outside import not_exported
from autopar.module.copies import RESIZING, SAVING, deep_copy, refuse_pickling, refuse_resizing, save, shallow_copy
from autopar.module.generation.generate import GENERATING, generate
from autopar.module.session import Session
from autopar.passes.annotate_layouts import annotate_layouts
from autopar.passes.copy_for_backward import copy_for_backward
from autopar.passes.pad_dims import pad_dims
from autopar.runtime.mesh import MeshContext
from autopar.runtime.state.materialize import Init
from autopar.runtime.state.parameters import gathered
from autopar.runtime.state.state_dict import load_full, prepare_load, savable
from autopar.runtime.state.storage import load_into
from autopar.runtime.step.step import deliver, reduce_deferred
from autopar.search.arguments import BATCH
from autopar.specialize import CompileOptions

_OWN = ("_autopar", "_state_dict_hooks", "_load_state_dict_pre_hooks")
"""Attributes that are not the original's."""

_WRAPPED = ("forward", "_original_forward")
"""Attributes by which libraries (accelerate, for autocast) put code around a module's forward."""


class ParallelModule(nn.Module):
    """A model whose parameters are on a mesh and whose steps run as rewritten graphs.

    Parameters are `DTensor`s under the original names (plain tensors where there is no mesh), so optimizers, clipping
    and state dicts work as usual. The first call decides their layouts, unless `autopar.parallelize` was given a batch.
    """

    _autopar: Session

    def __init__(self, model: nn.Module, context: MeshContext, options: CompileOptions, init: Init | None) -> None:
        """Torch's tables, hooks included, are the original's own; so is every attribute but those of ``_OWN``."""
        # Not nn.Module.__init__, which would make empty tables. Sharing the original's keeps both the same model:
        # what is set on one, or registered, is there on the other.
        self.__dict__.update({name: table for name, table in vars(model).items() if name in TORCHS})
        # But hooks of state dicts are this module's: the original's own state_dict() must not gather.
        for name in ("_state_dict_hooks", "_load_state_dict_pre_hooks"):
            self.__dict__[name] = OrderedDict(self.__dict__[name])
        self.__dict__["_autopar"] = Session(model, context, options, init)
        self.register_state_dict_post_hook(_save_hook)  # type: ignore[no-untyped-call]
        hooks: Any = self._state_dict_hooks
        hooks.move_to_end(next(reversed(hooks)), last=False)  # before the model's own change names
        self.register_load_state_dict_pre_hook(_load_hook)  # type: ignore[no-untyped-call]
        # For `model.encoder.load_state_dict(...)`, which does not come by this module's hook.
        for module in model.modules() if context.mesh is not None else ():
            module.register_load_state_dict_pre_hook(load_into)  # type: ignore[no-untyped-call]

    def __getattr__(self, name: str) -> Any:
        """Attributes of the original model, such as ``config``."""
        # Before __init__ has run, as in copies, `self._autopar` itself comes here: without this it would recurse.
        if name in _OWN:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._autopar.original, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> ParallelModule:
        """Of its own tensors, for averages of weights."""
        return deep_copy(self, memo)

    def __copy__(self) -> ParallelModule:
        """With the same tensors."""
        return shallow_copy(self)

    def __prepare_scriptable__(self) -> Any:
        """Of `torch.jit.script`: there is no script of it."""
        raise not_exported("torch.jit.script")

    def __reduce_ex__(self, protocol: Any) -> Any:
        """An error that says how to save a model."""
        return refuse_pickling()

    def __setattr__(self, name: str, value: Any) -> None:
        """Attributes are the original's, so that its forward sees what is set here."""
        if name in _OWN or isinstance(getattr(type(self), name, None), property):
            object.__setattr__(self, name, value)
        elif name == put_forward.NAME:
            self._put_forward(value)
        elif name in _WRAPPED and isinstance(value, MethodType) and value.__self__ is self:
            self.__dict__[name] = value
        elif name == "__class__" and issubclass(value, ParallelModule):
            raise AutoparError(
                _DERIVED.format(made=value.__name__, kind=type(self).__name__, what="is put on the model")
            )
        else:
            setattr(self._autopar.original, name, value)

    def __delattr__(self, name: str) -> None:
        """As for setting."""
        if name == put_forward.NAME and name in self.__dict__:
            self._put_forward(type(self).forward)
        elif name in _OWN or (name in _WRAPPED and name in self.__dict__):
            object.__delattr__(self, name)
        else:
            delattr(self._autopar.original, name)

    def _put_forward(self, value: Any) -> None:
        """Put a ``forward`` on the module; its own takes off what is there."""
        put_forward.remove(self._autopar)
        own = (type(self).forward, ParallelModule.forward)
        if getattr(value, "__func__", value) in own:
            self.__dict__.pop(put_forward.NAME, None)
        else:
            # One that was there before, around which others have been: it is put there again as it is.
            again = put_forward.is_put(value) and value.__self__ is self
            self.__dict__[put_forward.NAME] = value if again else put_forward.attribute(self, value)

    @property
    def training(self) -> bool:
        """The original's mode; the next call specializes for it if it has not yet."""
        found: bool = self._autopar.original.training
        return found

    @training.setter
    def training(self, mode: bool) -> None:
        self._autopar.original.training = mode

    @property
    def _is_full_backward_hook(self) -> Any:  # which torch reads with the table of hooks, and sets as it registers one
        return self._autopar.original._is_full_backward_hook

    @_is_full_backward_hook.setter
    def _is_full_backward_hook(self, value: Any) -> None:
        self._autopar.original._is_full_backward_hook = value

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As the original. Hooks of modules inside are part of the graphs; so are its own with ``loss_fn``."""
        # With a loss function the graph returns the loss, and hooks of the model must see the model's output.
        if self._autopar.options.loss_fn is not None:
            return self.forward(*args, **kwargs)
        before = self._autopar.forwards
        try:
            found = nn.Module.__call__(self, *args, **kwargs)
        except RankError as e:
            if self._leaves_own_out(before):
                raise _not_called(self.__dict__["forward"]) from e
            raise
        if self._leaves_own_out(before):
            raise _not_called(self.__dict__["forward"])
        return found

    def _leaves_own_out(self, before: int) -> bool:
        session = self._autopar
        return "forward" in self.__dict__ and session.forwards == before and not session.running

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the original returns: scalars plain, other tensors as DTensors."""
        session = self._autopar
        if not session.running:
            put_forward.remove(session)  # what is called is not it
        return session.forward(args, kwargs)

    def specialize(self, batch: Any) -> None:
        """Decide layouts and build the graphs for a global batch (real, fake or meta tensors) before the first call."""
        require(batch=(batch, BATCH))
        self._autopar.specialize(batch)

    @property
    def plan(self) -> Plan:
        """The plan of the parameters' layouts: that of the first specialization."""
        return self._autopar.plan

    @property
    def logical_graph(self) -> fx.GraphModule:
        """The latest specialization's graph on global tensors, with layouts."""
        session = self._autopar
        found = session.known(session.latest)
        return rewrite(found.program, found.plan, passes=(pad_dims, copy_for_backward, annotate_layouts)).graph

    @property
    def forward_graph(self) -> fx.GraphModule:
        """The latest specialization's forward graph on this rank's tensors."""
        # Of a step in microbatches, the graph of one of them, its backward pass included.
        return self._autopar.known(self._autopar.latest).step.cut.forward

    @property
    def backward_graph(self) -> fx.GraphModule | None:
        """Its backward graph; None if it does not train."""
        return self._autopar.known(self._autopar.latest).step.cut.backward

    @property
    def hoisted_graph(self) -> fx.GraphModule | None:
        """What runs before its first microbatch, for all of them; None if nothing does."""
        return self._autopar.known(self._autopar.latest).step.cut.hoisted

    @property
    def data_world_size(self) -> int:
        """Into how many parts the rows of a batch are split, over all workers: ``num_replicas`` of a sampler."""
        workers = self._autopar.context.workers
        return data_world_size(self._autopar) * (1 if workers is None else workers.count)

    @property
    def data_rank(self) -> int:
        """Which part this rank takes, of all workers' parts: ``rank`` of a sampler."""
        session, workers = self._autopar, self._autopar.context.workers
        return data_rank(session) + (0 if workers is None else workers.index * data_world_size(session))

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> list[str]:
        # The first thing that DistributedDataParallel asks of a module.
        if self._autopar.context.mesh is None:
            raise AttributeError("_ddp_params_and_buffers_to_ignore")
        raise AutoparError(
            "a parallelized model is distributed already: use it as it is, without DistributedDataParallel. "
            "transformers' Trainer, accelerate and lightning put it around a model; take those of autopar.integrations"
        )

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """Plain tensors by original name, as one device would hold them; a collective call."""
        session = self._autopar
        session.require_values()
        with session.together("full_state_dict()"):
            return gathered(self._own_tensors(), session.types(), session.context)

    def _own_tensors(self) -> dict[str, torch.Tensor]:
        """As they are on this rank, by original name."""
        return dict(nn.Module.state_dict(_Unhooked(self), keep_vars=True))

    def load_full_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take values from plain full tensors; every rank keeps its part.

        Raises:
            AutoparError: names are missing or unexpected, or a shape differs; nothing is changed then.
        """
        require(state=(state, a(Mapping, "a state dict: tensors by name")))
        session, own = self._autopar, self._own_tensors()
        with session.context.during("load_full_state_dict()", in_step=False):
            load_full(self, own, state, session.context, session.types())

    def full_gradients(self) -> dict[str, torch.Tensor]:
        """Plain gradients by original name, of parameters that have one; a collective call."""
        session = self._autopar
        session.deferred.refuse(self.parameters(), "full_gradients()")
        gradients = {n: p.grad for n, p in self.named_parameters() if p.grad is not None}
        with session.together("full_gradients()"):
            return gathered(gradients, session.types(), session.context)

    def explain(self, name: str) -> str:
        """Why a parameter has its layout; what of a module, or an operator, is saved or recomputed, and why."""
        require(name=(name, TEXT))
        # Imported when it is asked for, which is rare.
        from autopar.explain.parameters import explain

        return explain(self._autopar.known(self._autopar.first), name)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes within leave gradients unreduced; the next one outside reduces the sum, once.

        Until then ``.grad`` lacks them, and an optimizer's step is an error. ``zero_grad`` drops them.
        """
        deferred = self._autopar.deferred
        # Restored, and not set to False: libraries nest no_sync.
        before, deferred.active = deferred.active, True
        try:
            yield
        finally:
            deferred.active = before

    def reduce_gradients(self) -> None:
        """Reduce gradients that `no_sync` deferred, where no backward pass outside follows; a collective call."""
        session = self._autopar
        with session.together("reduce_gradients()"):
            deliver(reduce_deferred(session.deferred), session.deferred, session.context)


def parallel_module(
    model: nn.Module, context: MeshContext, options: CompileOptions, init: Init | None
) -> ParallelModule:
    """The module that runs a model on a mesh: of a class of its own, which is a subclass of the model's.

    So the model's methods and properties, special ones included, are those of the result: what they do to ``self`` is
    done to the parallel module, and ``self(...)`` runs on the mesh.
    """
    kind: Any = type(model)
    # Trainers read the signature of forward to find out which columns of a data set the model takes.
    signature = inspect.signature(model.forward)

    def forward(self: ParallelModule, *args: Any, **kwargs: Any) -> Any:
        return ParallelModule.forward(self, *args, **kwargs)

    forward.__doc__ = model.forward.__doc__
    try:
        class_ = type(kind)(
            kind.__name__, (ParallelModule, kind),
            {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "forward": _bound(forward, signature),
             # What a model makes by ``self.__class__(...)``, as ``model[:2]`` does, is one of its own kind.
             "__new__": lambda cls, *args, **kwargs: _another(kind, cls, args, kwargs),
             **{name: _own_method(name) for name in (*SAVING, *RESIZING, *GENERATING) if hasattr(kind, name)},
             **{name: _OfOriginal(name) for name in _defaults(kind)}},
        )  # fmt: skip
    except TypeError:  # a class that cannot be subclassed like this
        class_ = ParallelModule
    # Not class_(...), which may run the model's own __init__.
    parallel: ParallelModule = object.__new__(class_)
    ParallelModule.__init__(parallel, model, context, options, init)
    return parallel


def _another(kind: type, class_: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What calling the class of a parallelized model makes: a plain model of the model's own class.

    Raises:
        AutoparError: it is a class derived from it, whose code the plain model would not have.
    """
    if ParallelModule in class_.__bases__:
        return kind(*args, **kwargs)
    raise AutoparError(_DERIVED.format(made=class_.__name__, kind=kind.__name__, what="is called"))


_DERIVED = (
    "{made}, a class derived from the class of a parallelized model ({kind}), {what}: nothing that it adds would be in "
    "the model's graphs. Parametrize the model itself before parallelize() (its submodules at any time). Of "
    "a functional copy (higher) there is no graph: write the inner loop in the forward of a module that is "
    "parallelized, with torch.func.functional_call and torch.autograd.grad"
)


class _OfOriginal:
    """An attribute for which the model's class has a default: the model may have another value, which counts."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, module: ParallelModule | None, class_: Any = None) -> Any:
        if module is not None and "_autopar" in vars(module):
            return getattr(module._autopar.original, self._name)
        # Of the class, or while an object is made of it: what the classes that come after have.
        after = (vars(c)[self._name] for c in class_.__mro__ if self._name in vars(c))
        return next(value for value in after if not isinstance(value, _OfOriginal))


def _defaults(kind: type) -> list[str]:
    """Names of values in a model's classes that its objects may replace: no methods, and nothing of torch's modules."""
    found = {n: v for c in reversed(kind.__mro__) if c not in nn.Module.__mro__ for n, v in vars(c).items()}
    values = {n for n, v in found.items() if not n.startswith("__") and not hasattr(type(v), "__get__")}
    return [n for n in found if n in values and not hasattr(ParallelModule, n)]


def _not_called(forward: Any) -> AutoparError:
    name = put_forward.described(inspect.unwrap(forward.__func__))
    return AutoparError(
        f"forward of the parallelized model was replaced after parallelize() by {name}, which has called the model's "
        "own in an earlier call like this one, and not in this: what it does instead is in no graph, and every rank "
        "would compute all of it. Replace it before parallelize(), or let an argument that is True, False or a text "
        "decide what it does"
    )


def _own_method(name: str) -> Callable[..., Any]:
    """A method of the model that must not run on parameters of a mesh."""

    def method(self: ParallelModule, *args: Any, **kwargs: Any) -> Any:
        found = getattr(self._autopar.original, name)
        if self._autopar.context.mesh is None:
            return found(*args, **kwargs)
        if name in RESIZING:
            refuse_resizing(name)
        return (generate if name in GENERATING else save)(self, name, found, *args, **kwargs)

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


class _Unhooked(nn.Module):
    """The same tables without the hooks, which rename entries, or gather them a second time."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        for table in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            self.__dict__[table] = module.__dict__[table]


def _save_hook(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    assert isinstance(module, ParallelModule)
    types, context = module._autopar.types(), module._autopar.context
    with context.during("state_dict()", in_step=False):
        for name, value in list(state.items()):
            if name.startswith(prefix) and isinstance(value, DTensor):
                state[name] = savable(value, types.get(name.removeprefix(prefix)), context)


def _load_hook(module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    assert isinstance(module, ParallelModule)
    with module._autopar.context.during("load_state_dict()", in_step=False):
        prepare_load(module, state, prefix, module._autopar.context, module._autopar.types())
