"""A model with two of its alike blocks: only where they are proven alike."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autopar.capture.fewer_layers import UnreadableNumber, shorten
from benchmarks.gpt import GPT


def gpt(layers: int = 4) -> GPT:
    return GPT(32, 4, layers, 16, 96)


def test_two_of_the_alike_blocks_stay() -> None:
    model = gpt(12)
    short = shorten(model)
    assert (short.layers, short.reason) == (12, "")
    assert isinstance(short.model, GPT)
    assert len(short.model.layers) == 2
    assert len(model.layers) == 12  # as it was
    whole = dict(model.named_parameters())
    assert all(p is whole[name] for name, p in short.model.named_parameters())


def test_a_setting_that_differs_keeps_the_model_whole() -> None:
    model = gpt()
    model.layers[3].heads = 2
    assert shorten(model) == (model, None, "layers.3.heads differs from that of layers.0", "", 0, 1)


def test_a_shape_or_class_that_differs_keeps_the_model_whole() -> None:
    model = gpt()
    model.layers[2].up = nn.Linear(32, 64, device="meta")
    assert "layers.2.up" in shorten(model).reason
    model = gpt()
    model.layers[2].norm1 = nn.RMSNorm(32, device="meta")
    assert "layers.2.norm1" in shorten(model).reason


def test_the_first_blocks_may_be_others() -> None:
    model = gpt(7)
    model.layers[0].up = nn.Linear(32, 64, device="meta")
    model.layers[1].heads = 2
    for i, layer in enumerate(model.layers):
        layer.number = i
    short = shorten(model, 3)
    assert (short.layers, short.lead, short.reason, len(short.model.layers)) == (7, 2, "", 5)
    assert short.model.layers[0] is model.layers[0]
    assert [type(layer.number) for layer in short.model.layers] == [int, int, *[UnreadableNumber] * 3]
    model.layers[4].heads = 2  # an odd one further down: too few are left
    assert shorten(model, 3).reason.startswith("layers.1.")
    model.layers[6].heads = 2  # the last
    assert shorten(model, 3).layers is None


def test_frozen_and_evaluated_blocks_differ() -> None:
    model = gpt()
    model.layers[1].qkv.weight.requires_grad_(False)
    assert shorten(model).reason == "layers.1.qkv.weight differs from that of layers.0"
    model = gpt()
    model.layers[1].eval()
    assert shorten(model).reason == "layers.1.training differs from that of layers.0"


def test_a_block_that_comes_several_times_keeps_the_model_whole() -> None:
    model = gpt()
    model.layers = nn.ModuleList([model.layers[0]] * 4)
    assert shorten(model) == (model, None, "layers has the same block several times", "", 0, 1)


def test_a_block_elsewhere_keeps_the_model_whole() -> None:
    """It would come last, and stand for the blocks that were left out."""
    model = gpt()
    model.add_module("head", nn.Sequential(nn.Sequential(nn.Linear(32, 96, device="meta"))))
    assert shorten(model).reason == "head.0.0.weight is a block, too, outside layers"


def test_models_without_one_list_of_blocks_stay_whole() -> None:
    assert shorten(gpt(2)).layers is None
    assert shorten(nn.Linear(2, 2)).layers is None
    both = nn.ModuleDict({"a": gpt(), "b": gpt()})
    assert shorten(both).reason == "it has 2 lists of more than 2 blocks, not one"


def test_a_number_of_its_own_is_replaced_by_one_that_nobody_can_read() -> None:
    model = gpt()
    for i, layer in enumerate(model.layers):
        layer.number = i + 1
        layer.qkv.depth = i
        layer.width = 4
    short = shorten(model, 3)
    assert short.layers == 4
    assert len(short.model.layers) == 3
    for layer in short.model.layers:
        assert isinstance(layer.number, UnreadableNumber)
        assert isinstance(layer.qkv.depth, UnreadableNumber)
        assert layer.width == 4
    assert (model.layers[2].number, model.layers[2].qkv.depth) == (3, 2)  # as it was
    assert short.model.layers[2].qkv.weight is model.layers[2].qkv.weight
    number = short.model.layers[0].number
    for read in (int, str, bool, hash, lambda n: n + 1, lambda n: [1, 2][n], lambda n: n == 1, lambda n: f"{n}"):
        with pytest.raises(TypeError, match="a block's own number decides what it computes"):
            read(number)
    from transformers.cache_utils import DynamicCache

    cache = DynamicCache()
    for layer in short.model.layers:
        cache.update(torch.ones(1, 1, 1, 1), torch.ones(1, 1, 1, 1), layer.qkv.depth)
    assert len(cache.layers) == 3


def test_blocks_may_take_turns() -> None:
    """Three turns are captured, those that fill none are at the beginning; a number is that of its turn."""
    model = gpt(14)
    for i, layer in enumerate(model.layers):
        layer.heads = 2 if i % 3 == 2 else 4
        layer.number = i
        if i % 3 == 0:
            layer.qkv.depth = i  # no other has one
    short = shorten(model, 3)
    assert (short.layers, short.lead, short.period, len(short.model.layers)) == (14, 2, 3, 11)
    assert [layer.heads for layer in short.model.layers] == [layer.heads for layer in list(model.layers)[:11]]
    assert [type(layer.number) for layer in short.model.layers] == [int, int, *[UnreadableNumber] * 9]
    assert isinstance(short.model.layers[3].qkv.depth, UnreadableNumber)
    model.layers[10].heads = 3
    assert shorten(model, 3).layers is None
