"""``model.generate(...)`` of a model on a mesh: by graphs that leave parameters sharded, or with the whole model."""

from __future__ import annotations

import copy
import functools
import inspect
import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from autopar.errors import AutoparError, CaptureError, InfeasibleError, MissingRuleError, PlanError
from autopar.module.copies import whole_parameters
from autopar.module.generation.decode import Decoding
from autopar.runtime.dtensor import full_tensor
from autopar.runtime.mesh import MeshContext

if TYPE_CHECKING:
    from autopar.module.parallel_module import ParallelModule

GENERATING = ("generate",)
"""Methods of models that call them once for each new token."""

NO_GRAPHS = (CaptureError, InfeasibleError, MissingRuleError, PlanError)
"""Errors of making the graphs, which all ranks meet alike."""

logger = logging.getLogger("autopar")


class NotPlannedError(AutoparError):
    """Something that the graphs of `Decoding` are not for; its text says what."""


def generate(module: ParallelModule, name: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What one device would generate, on every rank; a collective call."""
    module._autopar.require_values()
    args = tuple(_whole(v) for v in args)
    kwargs = {k: _whole(v) for k, v in kwargs.items()}
    try:
        return _by_graphs(module, name, args, kwargs)
    except NotPlannedError as e:
        logger.warning("%s() puts the whole model on every rank while it runs: %s", name, e)
    return _with_whole_model(module, name, method, args, kwargs)


def _whole(value: Any) -> Any:
    return full_tensor(value) if isinstance(value, DTensor) else value


def _with_whole_model(
    module: ParallelModule, name: str, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    context = module._autopar.context
    with whole_parameters(module, keep=True, device=context.device):
        found = context.together(lambda: method(*args, **kwargs), f"{name}()")
    # Rank 0's on all: samples differ where generators of random numbers do.
    return context.decide(lambda: found, f"the result of {name}()")


def _by_graphs(module: ParallelModule, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Rank 0 runs transformers' own loop, and every rank the step of each token.

    So there is one sampler, with one generator of random numbers.

    Raises:
        NotPlannedError: the model, or an argument, is one that the graphs are not for.
    """
    session = module._autopar
    context, what = session.context, f"the next token of {name}()"
    _require_known_model(module)
    drawn = _generators(context)
    loop = _Loop(module, what)
    if context.rank == 0:
        try:
            found = loop.run(name, args, kwargs)
        except BaseException as error:
            if not loop.failed_together:
                _tell(context, what, error)
            raise
        context.decide(lambda: ("end", found), what)
    else:
        told = _told(context, what)
        while told[0] == "step":
            loop.step(told[1])
            told = _told(context, what)
        found = told[1]
    _draw_alike(context, drawn)
    return found


def _told(context: MeshContext, what: str) -> tuple[str, Any]:
    """What rank 0 says: a step's tokens, or the end and the result."""
    return context.decide(lambda: ("", None), what)


def _tell(context: MeshContext, what: str, error: BaseException) -> None:
    """Rank 0's own error, which the others wait for."""

    def failed() -> Any:
        raise error if isinstance(error, Exception) else AutoparError(f"rank 0 was stopped: {error!r}")

    try:
        context.decide(failed, what)
    except Exception as told:
        if told is not error and isinstance(error, Exception):
            raise


def _require_known_model(module: ParallelModule) -> None:
    session = module._autopar
    config = getattr(session.original, "config", None)
    if not getattr(session.original, "_can_compile_fullgraph", False) or getattr(config, "is_encoder_decoder", False):
        raise NotPlannedError(f"{session.name} is none of transformers' decoders that take a static cache")
    if session.first is None:
        raise NotPlannedError("no layouts are decided yet: pass batch= to parallelize(), or call the model once")
    if session.first.plan.pipeline is not None:
        raise NotPlannedError("its plan is a pipeline, of which one token would use one stage at a time")
    if session.context.workers is not None:
        raise NotPlannedError("workers train apart, and each has parameters of its own")


class _Loop:
    """One call of ``generate``.

    Attributes:
        failed_together: an error came from a step, so that all ranks have it.
    """

    def __init__(self, module: ParallelModule, what: str) -> None:
        self._session, self._what = module._autopar, what
        self._decoding: Decoding | None = None
        self._mask: torch.Tensor | None = None
        self.failed_together = False

    def run(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Rank 0's: the model's own method on a stand-in, whose forward is a step of all ranks."""
        original: Any = self._session.original
        stand_in = copy.copy(original)
        stand_in.__dict__["config"] = copy.deepcopy(original.config)
        stand_in.__dict__["generation_config"] = copy.deepcopy(original.generation_config)
        prepare = original.prepare_inputs_for_generation

        @functools.wraps(original.forward)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return self._forward(*args, **kwargs)

        @functools.wraps(prepare)
        def prepare_inputs_for_generation(*args: Any, **kwargs: Any) -> Any:
            # By token, where the library makes one of pairs of tokens for its static cache.
            self._mask = kwargs.get("attention_mask")
            return {**prepare(*args, **kwargs), "attention_mask": None}

        vars(stand_in).update(forward=forward, prepare_inputs_for_generation=prepare_inputs_for_generation)
        config = _config_of(stand_in, kwargs)
        _refuse(config, kwargs)
        # For the library to keep count of tokens in; nothing is ever stored in it.
        static = {"cache_implementation": "static", "use_cache": True, "disable_compile": True}
        return getattr(type(original), name)(stand_in, *args, **{**kwargs, **static})

    def _forward(
        self, input_ids: Any = None, past_key_values: Any = None, position_ids: Any = None, **others: Any
    ) -> Any:
        from transformers import StaticCache
        from transformers.modeling_outputs import CausalLMOutputWithPast

        known = ("attention_mask", "use_cache", "return_dict", "logits_to_keep")
        more = [n for n, v in others.items() if v is not None and v is not False and n not in known]
        if more or not isinstance(input_ids, torch.Tensor) or not isinstance(past_key_values, StaticCache):
            raise NotPlannedError(f"it takes {', '.join(more) or 'other inputs than tokens'}")
        if any(type(layer).__name__ != "StaticLayer" for layer in past_key_values.layers):
            raise NotPlannedError("some of its layers keep other states than all keys and values, such as a window's")
        if self._decoding is not None and input_ids.shape[1] != 1:
            raise NotPlannedError("it is asked for several tokens at once")
        if position_ids is None and "position_ids" in inspect.signature(self._session.original.forward).parameters:
            raise NotPlannedError("it does not say which positions tokens have")
        if position_ids is not None and position_ids.ndim != 2:
            raise NotPlannedError("its positions are of several dims")
        sent = {
            "input_ids": input_ids, "attention_mask": self._mask, "position_ids": position_ids,
            "most": past_key_values.layers[0].max_cache_len,
        }  # fmt: skip
        self._session.context.decide(lambda: ("step", _on_host(sent)), self._what)
        logits = self.step(sent)
        for layer in past_key_values.layers:
            layer.is_initialized, layer.cumulative_length = True, torch.tensor(self._written, device=logits.device)
        return CausalLMOutputWithPast(logits=logits, past_key_values=past_key_values)

    @property
    def _written(self) -> int:
        return 0 if self._decoding is None else self._decoding.written

    def step(self, sent: Mapping[str, Any]) -> torch.Tensor:
        """A step of every rank.

        Raises:
            NotPlannedError: there can be no graph for it.
        """
        device = self._session.context.device
        tensors = {
            n: v.to(device) if isinstance(v, torch.Tensor) else v for n, v in sent.items() if n != "most"
        }  # fmt: skip
        try:
            if self._decoding is None:
                self._decoding = Decoding(self._session, sent["most"])
            return self._decoding.step(**tensors)
        except NO_GRAPHS as e:
            self.failed_together = True
            raise NotPlannedError(f"its step with a cache has no graph: {e}") from e
        except BaseException:
            self.failed_together = True
            raise


def _on_host(sent: Mapping[str, Any]) -> dict[str, Any]:
    return {n: v.cpu() if isinstance(v, torch.Tensor) else v for n, v in sent.items()}


def _config_of(model: Any, kwargs: Mapping[str, Any]) -> Any:
    """How ``generate`` will be configured: its own argument, changed by further ones."""
    config = copy.deepcopy(kwargs.get("generation_config") or model.generation_config)
    config.update(**{k: v for k, v in kwargs.items() if hasattr(config, k)})
    return config


def _refuse(config: Any, kwargs: Mapping[str, Any]) -> None:
    """Refuse what the loop of one token a step is not.

    Raises:
        NotPlannedError: names the argument.
    """
    mode = str(config.get_generation_mode(kwargs.get("assistant_model")).value)
    given = [n for n in ("past_key_values", "inputs_embeds", "custom_generate", "prefill_chunk_size") if kwargs.get(n)]
    # Their results hold the cache, or what no graph returns.
    given += [n for n in ("return_dict_in_generate", "output_attentions", "output_hidden_states", "prefill_chunk_size")
              if getattr(config, n, None)]  # fmt: skip
    if mode not in ("greedy_search", "sample"):
        raise NotPlannedError(f"{mode} is neither greedy nor plain sampling")
    if given:
        raise NotPlannedError(f"with {given[0]}= one step is not all that is asked for")
    if getattr(config, "cache_implementation", None) not in (None, "static", "dynamic"):
        raise NotPlannedError(f"cache_implementation={config.cache_implementation!r} is no static cache")


def _generators(context: MeshContext) -> Any:
    """The default generators' states on this rank, and whether they are those of rank 0."""
    own = _states(context)
    first = context.decide(lambda: own, "the random numbers of generate()")
    return all(torch.equal(a, b) for a, b in zip(own, first, strict=True))


def _draw_alike(context: MeshContext, alike: bool) -> None:
    """Ranks whose generators were in one state before have drawn what rank 0 has."""
    states = context.decide(lambda: _states(context), "the random numbers of generate()")
    if alike:
        torch.set_rng_state(states[0])
        if len(states) > 1:
            torch.cuda.set_rng_state(states[1])


def _states(context: MeshContext) -> list[torch.Tensor]:
    found = [torch.get_rng_state()]
    return [*found, torch.cuda.get_rng_state()] if context.device.type == "cuda" else found
