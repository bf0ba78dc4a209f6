"""Operators along a split sequence: equal values, only what neighbors lack is sent, and the search finds it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from autopar.compiler import plan, program_of, rewrite, solve
from autopar.ir.node_info import info
from autopar.ir.ops.sequence.halo import check, reach
from autopar.ir.ops.sequence.send_block import MIRROR, NEXT, PREVIOUS, send_block, sent
from autopar.ir.program import Program
from autopar.search.options import Search
from autopar.sharding.candidates import candidates
from autopar.sharding.dims import analyze
from autopar.verify.verify import verify
from tests.crossed import is_deep
from tests.distributed.models import slow_devices
from tests.strategies.sequence_models import MODELS, Stack

deep = pytest.mark.deep


def sends(program: Program) -> int:
    return sum(n.target is send_block for n in program.graph.graph.nodes)


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("name", "axes"),
    [
        *((name, {"a": 2, "b": 2}) for name in MODELS if name != "chunks"),
        ("chunks", {"a": 2}),
        pytest.param("chunks", {"a": 2, "b": 2}, marks=deep),
        *(pytest.param(name, {"a": 2}, marks=deep) for name in MODELS if name != "chunks"),
        *(pytest.param(name, axes, marks=deep) for name in MODELS for axes in ({"a": 4}, {"a": 2, "b": 4})),
    ],
)
def test_equal_values(name: str, axes: dict[str, int]) -> None:
    model, batch = MODELS[name]
    made = []
    for seed in range(2):
        report = verify(model().double(), (batch,), axes, plan="random", seed=seed)
        assert report.max_error < 1e-10
        made.append(sends(report.program))
        if made[-1] and not is_deep():
            break
    assert any(made)


@pytest.mark.some(2)
@pytest.mark.parametrize("recompute", ["search", pytest.param("regather", marks=deep)])
@pytest.mark.parametrize(
    ("name", "axes"),
    [
        ("recurrence", {"a": 2, "b": 2}),
        ("shifts", {"a": 4}),
        ("pictures", {"a": 4}),
        ("windows", {"a": 4}),
        ("patches", {"a": 2}),
        ("pooled", {"a": 4}),
        *(
            pytest.param(name, axes, marks=deep)
            for name, axes in (("recurrence", {"a": 4}), ("shifts", {"a": 2, "b": 2}))
        ),
    ],
)
def test_every_part_of_a_sequence_stays_where_it_is(name: str, axes: dict[str, int], recompute: str) -> None:
    """But for rows of neighbors, and a row of all for running sums."""
    model, batch = MODELS[name]
    search = Search(roles=dict.fromkeys(axes, "context"), pins={"recompute": recompute})
    report = verify(
        model().double(),
        (batch,),
        axes,
        plan=plan(model().double(), (batch,), cluster="h100", axes=axes, search=search),
    )
    assert report.max_error < 1e-10
    assert sends(report.program) >= len(axes) * 3
    parameters = max(p.numel() for p in model().parameters())
    for node in report.program.graph.graph.nodes:
        made = info(node).collective
        if (
            made is not None
            and made.kind in ("all_gather", "all_to_all")
            and isinstance(node.meta["val"], torch.Tensor)
        ):
            assert node.meta["val"].numel() <= parameters, node.name  # and no activation


def test_a_window_longer_than_a_part_is_no_candidate() -> None:
    """A kernel of 4 reads 3 rows before a device's own: 8 devices have 2 of 16 each."""
    model, batch = MODELS["recurrence"]
    program = program_of(model().double(), (batch,))
    dims = analyze(program)
    (convolution,) = (o for n, o in dims.operators.items() if str(n.target) == "autopar.padded_convolution.default")
    (letter,) = convolution.rule.lower
    split = {
        n: any(f"{letter}.0" in chosen.names(i) for i in range(len(chosen.choice)))
        for n in (2, 4, 8)
        for chosen in [candidates(convolution, (n,))]
    }
    assert split == {2: True, 4: True, 8: False}
    assert verify(model().double(), (batch,), {"a": 8}, plan="random", seed=1).max_error < 1e-10


@pytest.mark.parametrize(("low", "high"), [(3, 0), (0, 3), (3, -3), (-3, 3), (2, -3)])
def test_windows_that_reach_too_far_are_refused(low: int, high: int) -> None:
    enough = reach(low, high)
    check(enough, low, high)
    with pytest.raises(ValueError, match=f"a device has {enough - 1} rows"):
        check(enough - 1, low, high)


class Turned(nn.Module):
    """Two dims are rolled, reversed and convolved: no two of them by different code at once."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        turned = (x * self.weight).roll((1, -2), (1, 2)).flip(1, 2) + self.weight.cumsum(0).roll(1, 0)
        return (turned * (x * self.weight).cumsum(2)).tanh().sum()


@pytest.mark.slow
def test_two_dims_take_different_code() -> None:
    x = torch.randn(2, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    made = 0
    for seed in range(3):
        report = verify(Turned().double(), (x,), {"a": 2, "b": 2}, plan="random", seed=seed)
        assert report.max_error < 1e-10
        made += sends(report.program)
        if made and not is_deep():
            break
    assert made
    # The search has no candidate that no pass could emit.
    axes = {"a": 2, "b": 2}
    assert (
        verify(Turned().double(), (x,), axes, plan=plan(Turned().double(), (x,), cluster="cpu", axes=axes)).max_error
        < 1e-10
    )


@pytest.mark.slow
@pytest.mark.thorough
def test_the_search_splits_one_long_sequence() -> None:
    with torch.device("meta"):
        model, x = Stack(2, 1024).bfloat16(), torch.zeros(1, 131072, 1024, dtype=torch.bfloat16)
    program = program_of(model, (x,))
    found = solve(program, {"gpu": 8}, "h100")
    kinds = Counter(n.target for n in rewrite(program, found).graph.graph.nodes)
    assert kinds[send_block] == found.predicted.collectives["gpu"]["send"] > 0


def test_blocks_go_to_neighbors_and_to_the_opposite() -> None:
    blocks: Any = [torch.tensor([r]) for r in range(4)]
    assert [[int(t) for t in sent(blocks, to)] for to in (NEXT, PREVIOUS, MIRROR)] == [
        [3, 0, 1, 2], [1, 2, 3, 0], [3, 2, 1, 0],
    ]  # fmt: skip


@pytest.mark.parametrize("parts", [2, pytest.param(4, marks=deep)])
def test_no_shape_depends_on_the_device(parts: int) -> None:
    """Passes know the tensors of one device: those of all others must look the same."""
    model, batch = MODELS["shifts"]
    axes = {"a": parts}
    found = plan(model().double(), (batch,), cluster="h100", axes=axes, search=Search(roles={"a": "context"}))
    local = rewrite(program_of(model().double(), (batch,)), found)
    assert sends(local) > 0
    for node in local.graph.graph.nodes:
        numbers = [a for a in node.all_input_nodes if isinstance(a.meta.get("val"), int | bool)]
        if str(node.target) in ("aten.slice.Tensor", "aten.constant_pad_nd.default"):
            assert not numbers, node.name


class Chunked(nn.Module):
    """Linear attention by a loop over chunks, each of which needs the state that the one before leaves."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(1, (2, 4)).unflatten(-1, (2, 4)).transpose(2, 3) for t in self.qkv(x).chunk(3, -1))
        state, made = torch.zeros_like(q[:, 0]), []
        for i in range(2):
            of, into, read = q[:, i], k[:, i].softmax(-1).transpose(-1, -2), v[:, i]
            made.append(of @ state + (of @ into).tril() @ read)
            state = 0.9 * state + into @ read
        loss: torch.Tensor = self.out(torch.stack(made, 1).transpose(2, 3).flatten(3).flatten(1, 2)).square().mean()
        return loss


@pytest.mark.slow
def test_loops_over_positions_are_split_by_heads() -> None:
    """On an axis that splits the sequence, which cannot split them; else every device would compute them all."""
    model, batch = Chunked().double(), (torch.randn(2, 8, 8, dtype=torch.float64),)
    program, axes, search = program_of(model, batch), {"a": 2}, Search(roles={"a": "context"}, padding=False)
    found = solve(program, axes, slow_devices(), search=search)
    products = [n for n in rewrite(program, found).graph.graph.nodes if n.target is torch.ops.aten.bmm.default]
    assert len(products) > 8
    assert {n.meta["val"].shape[0] for n in products} == {2}  # of 4: two samples of two heads
    assert verify(model, batch, axes, plan=found).max_error < 1e-10


@deep
def test_mamba2() -> None:
    """Whose convolution and chunks are split, the sequence of chunks being short."""
    from transformers import Mamba2Config, Mamba2ForCausalLM

    sizes = {"hidden_size": 8, "state_size": 4, "head_dim": 4, "num_heads": 4, "n_groups": 1, "chunk_size": 4}
    config = Mamba2Config(vocab_size=32, num_hidden_layers=1, conv_kernel=4, use_cache=False, **sizes)
    torch.manual_seed(0)
    model = Mamba2ForCausalLM(config).double()
    tokens = torch.randint(32, (2, 16))
    made = 0
    for seed in range(3):
        batch = {"input_ids": tokens, "labels": tokens}
        report = verify(model, batch, {"a": 2, "b": 2}, plan="random", seed=seed)
        assert report.max_error < 1e-10
        made += sends(report.program)
        if made and not is_deep():
            break
    assert made
