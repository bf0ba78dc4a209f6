"""A training step: stages, microbatches, data ranks; the closed form is what the simulator says."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.costs.cluster import Cluster
from autopar.costs.collectives import collective_seconds
from autopar.costs.kernels import stream
from autopar.explain.hybrid.layer_profile import AFTER, BEFORE, Activity, Part
from autopar.explain.hybrid.training_step import Stages, Training, simulated, simulated_seconds, stages_of, step_seconds
from autopar.sharding.redistribute.moves import Machine

A100 = Cluster.preset("a100-80gb")
MACHINE = Machine(("tensor",), (2,), A100.link_for({"tensor": 2}), A100.device)
TIMES = st.floats(1e-3, 1.0)


def part(name: str, moved: float, parameters: float) -> Part:
    forward, backward = Activity({"float16": stream(moved)}), Activity({"float16": stream(2 * moved)})
    return Part(name, forward, backward, {2: parameters}, saved=10.0, output_bytes=1e6)


PARTS = (part(BEFORE, 1e6, 5e6), part("layers.0", 1e9, 1e6), part("layers.1", 1e9, 1e6), part(AFTER, 5e8, 0.0))


@given(forward=TIMES, backward=TIMES, count=st.integers(1, 5), microbatches=st.integers(1, 12), slow=st.integers(0, 4))
def test_the_closed_form_is_what_the_simulator_says(
    forward: float, backward: float, count: int, microbatches: int, slow: int
) -> None:
    """One stage slower than the others, which are alike. Unless it is the last one, some of its time can be hidden."""
    there, back = np.full(count, forward), np.full(count, backward)
    there[slow % count] *= 1.5
    back[slow % count] *= 1.5
    stages = Stages(there, back, 0.0, 0.0, 0.0)
    closed, simulated = step_seconds(stages, microbatches), simulated_seconds(stages, microbatches)
    assert closed >= simulated * (1 - 1e-9)
    if slow % count == count - 1:
        assert closed == pytest.approx(simulated)


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 2), (2, 8), (4, 16), (8, 24), (8, 64)])
def test_the_closed_form_knows_what_is_under_way(stages: int, microbatches: int) -> None:
    found = Stages(np.full(stages, 1.0), np.full(stages, 2.0), 0.05, 0.5, 0.25)
    assert step_seconds(found, microbatches) == pytest.approx(simulated_seconds(found, microbatches), rel=1e-2)


def test_the_simulated_schedule_decides_time_and_memory() -> None:
    found = Stages(np.full(4, 1.0), np.full(4, 2.0), 0.0, 0.0, 0.0)
    gpipe, one = (simulated(found, 8, schedule, saved=7.0) for schedule in ("gpipe", "1f1b"))
    assert gpipe.step_seconds == one.step_seconds
    peaks = [sum(t.peak_memory(d).values()) for t, d in ((gpipe, 0), (one, 0), (one, 3))]
    assert peaks == [8 * 7.0, 4 * 7.0, 7.0]
    assert simulated_seconds(found, 8, "zb-h1") < one.step_seconds


def test_stages_share_the_blocks() -> None:
    one = stages_of(PARTS, A100, MACHINE, Training())
    two = stages_of(PARTS, A100, MACHINE, Training(stages=2))
    assert two.forward.sum() == pytest.approx(one.forward.sum())
    assert two.forward[0] < two.forward[1]  # the head is longer than the embedding
    with pytest.raises(ValueError, match="3 stages do not divide 2 repeated blocks"):
        stages_of(PARTS, A100, MACHINE, Training(stages=3))


def test_stages_send_parts_of_what_is_replicated() -> None:
    near, after = MACHINE.links[0], A100.link_for({"stage": 2, "rest": 8})[0]
    alike = tuple(replace(p, replicated_bytes=(8e5,)) for p in PARTS)
    machine = Machine(("tensor",), (2,), A100.link_for({"tensor": 2}), A100.device)
    whole, parts = (stages_of(p, A100, machine, Training(stages=2, data=4)).send for p in (PARTS, alike))
    gathered = float(collective_seconds("all_gather", 8e5, 2, near))
    assert whole == pytest.approx(1e6 / after.bandwidth + after.latency)
    assert parts == pytest.approx((2e5 + 4e5) / after.bandwidth + gathered + after.latency)
    slow = replace(machine, links=(replace(near, bandwidth=1e6),))  # where gathering takes longer, all is sent
    assert stages_of(alike, A100, slow, Training(stages=2, data=4)).send == whole


def test_one_block_stands_for_many() -> None:
    shallow = (PARTS[0], PARTS[1], PARTS[3])
    assert stages_of(shallow, A100, MACHINE, Training(layers=2)).forward == pytest.approx(
        stages_of(PARTS, A100, MACHINE, Training()).forward
    )


def test_full_recomputation_runs_the_blocks_twice() -> None:
    plain = stages_of(PARTS, A100, MACHINE, Training())
    again = stages_of(PARTS, A100, MACHINE, Training(recompute="full"))
    turn, turn_again = (float((s.forward + s.backward)[0]) for s in (plain, again))
    bandwidth = A100.device.bandwidth * A100.device.streaming
    assert turn_again - turn == pytest.approx(2 * (1e9 / bandwidth + A100.device.launch))


def test_data_ranks_sum_gradients_over_the_link_between_them() -> None:
    stages = stages_of(PARTS, A100, MACHINE, Training(data=16))
    link, _ = A100.link_for({"data": 16, "stage": 2})
    assert stages.reduce == pytest.approx(float(collective_seconds("all_reduce", 2 * 7e6, 16, link)))
    assert stages_of(PARTS, A100, MACHINE, Training()).reduce == 0.0


def test_the_optimizer_step_is_bound_by_memory() -> None:
    """A 2-byte parameter with Adam: gradient twice, master and two moments there and back, the parameter."""
    bandwidth = A100.device.bandwidth * A100.device.streaming
    adam = stages_of(PARTS, A100, MACHINE, Training())
    plain = stages_of(PARTS, A100, MACHINE, Training(optimizer="sgd"))
    assert adam.update == pytest.approx(7e6 * (2 * 2 + 2 * 12 + 2) / bandwidth)
    assert plain.update == pytest.approx(7e6 * (2 * 2 + 2 * 4 + 2) / bandwidth)


def test_a_slow_host_holds_the_device_up() -> None:
    slow = Machine(MACHINE.names, MACHINE.sizes, MACHINE.links, replace(A100.device, host=1.0))
    stages = stages_of(PARTS, A100, slow, Training())
    assert float((stages.forward + stages.backward)[0]) == pytest.approx(8.0)  # eight kernels, a second each


@pytest.mark.parametrize(
    ("wrong", "message"), [({"stages": 0}, "stages must be"), ({"recompute": "some"}, "there are")]
)
def test_wrong_arguments_are_named(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Training(**wrong)  # type: ignore[arg-type]
