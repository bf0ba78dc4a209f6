"""A language model's step with a static key-value cache as graphs of its own, which leave parameters sharded.

Two graphs serve all tokens of prompts and answers whose lengths round up to the same: one of the prompt, which makes
the cache, and one of the next token, which takes the cache and returns it. Both are planned for the time of one call,
without a backward pass, under the layouts that the parameters have.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autopar.module.session import Session
from autopar.runtime.dtensor import full_tensor

LEAST = 16
"""Tokens that a graph of a prompt, or a cache, is for at least."""

SHARED = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
"""Tables that the step has in common with the model."""


OF = "step_of"
"""Attribute for the model itself: no name that a module in it has, since names of those are the step's own."""


class CachedStep(nn.Module):
    """One call of a model whose keys and values go in and come out as tensors: under the model's parameter names."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.__dict__.update({name: vars(model)[name] for name in SHARED})
        # Not a module of this one: its parameters are here already.
        self.__dict__[OF] = model
        self.training = model.training

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor | None,
        attention_mask: torch.Tensor,
        written: torch.Tensor,
        last: torch.Tensor,
        length: int,
        keys: list[torch.Tensor] | None = None,
        values: list[torch.Tensor] | None = None,
    ) -> dict[str, Any]:
        """Logits after one token of each row, and the cache.

        Args:
            input_ids: tokens, ``[rows, tokens]``.
            position_ids: of the tokens; None: the model takes none.
            attention_mask: of ``length`` tokens of each row, True for all but padding.
            written: how many tokens the cache has, a scalar.
            last: which token's logits are asked for, ``[1]``.
            length: of the cache.
            keys: of the cache, by layer; None: it is empty.
            values: likewise.
        """
        from transformers import StaticCache

        model = self.__dict__[OF]
        cache = StaticCache(model.config.get_text_config(decoder=True), length)
        for i, layer in enumerate(cache.layers):
            layer.cumulative_length = written.clone()
            if keys is None or values is None:
                layer.lazy_initialization = partial(_allocate, layer)
            else:
                _describe(layer, keys[i], values[i])
                layer.keys, layer.values = keys[i].clone(), values[i].clone()
        known = inspect.signature(model.forward).parameters
        named = {} if position_ids is None else {"position_ids": position_ids}
        kept = {"logits_to_keep": last} if "logits_to_keep" in known else {}
        output = model.forward(
            input_ids=input_ids, attention_mask=attention_mask, past_key_values=cache, use_cache=True, return_dict=True,
            **named, **kept,
        )  # fmt: skip
        logits = output.logits if kept else output.logits.index_select(1, last)
        layers = cache.layers
        return {"logits": logits, "keys": [x.keys for x in layers], "values": [x.values for x in layers]}


def _allocate(layer: Any, keys: torch.Tensor, values: torch.Tensor) -> None:
    """As the layer itself, without a mark on tensors that a trace has only."""
    _describe(layer, keys, values)
    layer.keys = keys.new_zeros(*keys.shape[:2], layer.max_cache_len, keys.shape[-1])
    layer.values = values.new_zeros(*values.shape[:2], layer.max_cache_len, values.shape[-1])


def _describe(layer: Any, keys: torch.Tensor, values: torch.Tensor) -> None:
    layer.dtype, layer.device = keys.dtype, keys.device
    layer.batch_size, layer.num_heads = keys.shape[:2]
    layer.k_head_dim, layer.v_head_dim = keys.shape[-1], values.shape[-1]
    layer.is_initialized = True


_sessions: WeakKeyDictionary[Session, Session] = WeakKeyDictionary()


def _session_of(parent: Session) -> Session:
    """The session of the model's step with a cache, one for all calls: graphs of known lengths are there."""
    if parent not in _sessions:
        # What the user asked for is for training: a recipe's axes, microbatches and pins need not fit one token.
        search = parent.options.search
        tied = search.tie_layers and search.recipe != "random"  # which lays layers out apart
        search = replace(search, recipe=None, roles={}, pins={}, tie_layers=tied)
        options = replace(
            parent.options, search=search, plan=None, loss=None, loss_fn=None, check=False, inputs="global"
        )
        found = Session(CachedStep(parent.original), parent.context, options, None)
        found.first = parent.first  # which says how parameters are laid out
        found.unread = parent.unread  # or it would lay out anew what others read
        _sessions[parent] = found
    found = _sessions[parent]
    found.original.training = parent.original.training
    return found


class Decoding:
    """The tokens of one call of ``generate``, on every rank.

    Attributes:
        written: how many tokens the cache has.
    """

    def __init__(self, parent: Session, most: int) -> None:
        """``most``: tokens that the cache will have to have room for."""
        self.session, self.length, self.written = _session_of(parent), rounded(most), 0
        self.cache: dict[str, list[torch.Tensor]] = {}

    @torch.no_grad()
    def step(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None, position_ids: torch.Tensor | None
    ) -> torch.Tensor:
        """Logits after the last token, ``[rows, 1, vocabulary]``, whole; a collective call with the same tokens.

        Args:
            input_ids: the prompt, then one token of each row.
            attention_mask: of all tokens so far, 0 for padding; None: there is none.
            position_ids: of ``input_ids``; None: the model takes none.
        """
        rows, count = input_ids.shape
        mask = torch.ones(rows, self.length, dtype=torch.bool)
        if attention_mask is not None:
            mask[:, : attention_mask.shape[1]] = attention_mask.bool()
        # A prompt is padded on the right, where no token of it looks: a later token is written over the padding.
        more = min(rounded(count), self.length) - count if not self.cache else 0
        results = self.session.call((), {
            "input_ids": _longer(input_ids, more), "attention_mask": mask, "length": self.length,
            "position_ids": None if position_ids is None else _longer(position_ids, more),
            "written": torch.tensor(self.written), "last": torch.tensor([count - 1]), **self.cache,
        })  # fmt: skip
        self.cache = {name: results[name] for name in ("keys", "values")}
        self.written += count
        logits = results["logits"]
        return full_tensor(logits) if isinstance(logits, DTensor) else logits


def _longer(tokens: torch.Tensor, more: int) -> torch.Tensor:
    """The last column repeated: positions stay within what the model knows."""
    return torch.cat([tokens, tokens[:, -1:].expand(-1, more)], dim=1).contiguous()


def rounded(tokens: int) -> int:
    """A power of two: few graphs for many lengths."""
    return max(LEAST, 1 << (tokens - 1).bit_length())
