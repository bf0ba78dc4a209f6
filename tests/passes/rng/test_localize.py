"""localize_random and replicate_random: each device draws its block from a seed, or the whole as one device does."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from autopar.compiler import program_of, rewrite
from autopar.ir.ops.random import same_numbers, step_seed
from autopar.ir.program import Program
from autopar.passes import DETERMINISTIC_PASSES, PASSES
from autopar.verify.emulate import emulate, run_whole
from tests.plans import hand_plan, show


class Noise(nn.Module):
    """Noise around a parameter, and a draw before it that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        torch.rand(3)
        return torch.randn(4, 8) + self.w


AXES = {"a": 2, "b": 2, "c": 2}


def programs(strategy: str, result: str) -> tuple[Program, Program, Program]:
    """The program, and what both kinds of passes make of it."""
    program = program_of(Noise(), (torch.ones(2),), training=False)
    choices = {n.name: strategy for n in program.graph.graph.nodes if n.name in ("draw_default_1", "add")}
    assert len(choices) == 2
    plan = hand_plan(program, AXES, choices, results={"0": result})
    return program, rewrite(program, plan), rewrite(program, plan, passes=DETERMINISTIC_PASSES)


def run(program: Program) -> list[Tensor]:
    inputs = [[torch.zeros(n.meta["val"].shape)] * 8 for n in program.placeholders]
    (values,) = emulate(program, tuple(AXES), tuple(AXES.values()), inputs)
    return [v for v in values if v is not None]


def test_before_and_after() -> None:
    _, local, whole = programs("a.0 R b.0", "S(0) R S(1)")
    assert "localize_random" in [p.__name__ for p in PASSES]
    assert show(local).startswith("""\
w  # f32[w]
batch0  # f32[batch]
seeded = seeded(autopar.draw.default, 0, 0, 'uniform', [0, 1], [3], [0], dtype=torch.float32)  # f32[d3]
axis_index = axis_index('a')
axis_index.1 = axis_index('c')
mul = mul(axis_index, 2)
add = add(mul, axis_index.1)
seeded.1 = seeded(autopar.draw.default, 1, add, 'normal', [0, 1], [2, 4], [0, 1], dtype=torch.float32)\
""")
    assert "autopar.draw('normal', [0, 1], [4, 8]" in show(whole)


def test_blocks_differ_replicas_are_equal_and_steps_are_new() -> None:
    _, local, _ = programs("a.0 R b.0", "S(0) R S(1)")
    with step_seed(1):
        first = run(local)
        torch.rand(5)  # the state of the default generator is of no matter
        assert all(torch.equal(a, b) for a, b in zip(first, run(local), strict=True))
    with step_seed(2):
        second = run(local)
    for rank, value in enumerate(first):
        assert value.shape == (2, 4)
        assert not torch.equal(value, second[rank])
        for other, against in enumerate(first):
            same_block = rank & 0b101 == other & 0b101  # they differ along b only
            assert torch.equal(value, against) == same_block


def test_together_the_devices_draw_what_one_draws() -> None:
    program, _, local = programs("a.0 R b.0", "S(0) R S(1)")
    with same_numbers(5):
        (expected,) = run_whole(program, [torch.zeros(n.meta["val"].shape) for n in program.placeholders])
        state = torch.get_rng_state()
    assert expected is not None
    with same_numbers(5):
        found = run(local)
        assert torch.equal(torch.get_rng_state(), state)
    for rank, value in enumerate(found):
        a, c = rank >> 2, rank & 1
        assert torch.equal(value, expected[2 * a : 2 * a + 2, 4 * c : 4 * c + 4])
