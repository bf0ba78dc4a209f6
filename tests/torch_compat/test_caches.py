"""Contracts: what torch keeps, and how it is forgotten."""

from __future__ import annotations

import gc
import linecache

import torch
from torch import fx, nn

from autopar import _torch_compat as compat


def test_sources_go_with_their_graphs() -> None:
    for kind in (fx.GraphModule, compat.LazyGraphModule):
        graph = fx.Graph()
        graph.output(graph.call_function(torch.neg, (graph.placeholder("x"),)))
        made = kind(nn.Module(), graph)
        compat.forget_source_with(made)
        assert made(torch.ones(1)).item() == -1
        file = type(made).forward.__code__.co_filename
        assert "torch.neg" in linecache.getline(file, 5) + linecache.getline(file, 6), linecache.getlines(file)
        del made, graph
        gc.collect()
        assert linecache.getlines(file) == []


def test_fake_results_are_forgotten() -> None:
    with compat.new_fake_results() as results, compat.FakeTensorMode():
        torch.ones(3, 1237).t() @ torch.ones(3, 1237)
    assert results and all(key in compat.FakeTensorMode.cache for key in results)
    with compat.new_fake_results() as again, compat.FakeTensorMode():
        torch.ones(3, 1237).t() @ torch.ones(3, 1237)
    assert again == []
    compat.forget_fake_results(results)
    assert not any(key in compat.FakeTensorMode.cache for key in results)
