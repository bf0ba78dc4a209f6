"""A run goes on from what its ranks have in memory, on another number of them; and real nodes that are killed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.elastic_nodes import MODEL, Nodes, expected, lost_steps
from tests.distributed.launch import WAIT, Ranks

pytestmark = pytest.mark.distributed

SEED = 49000000


def started(rank: int, nodes: str, root: str, seed: int, **settings: Any) -> tuple[Any, Any]:
    """A start of the run on the first ranks, each a node of that name; a function that makes a step."""
    from torch.distributed import DeviceMesh

    import autopar

    names: dict[str, Any] = {}
    exec(MODEL, names)
    local = os.environ["LOCAL_WORLD_SIZE"]
    os.environ |= {"AUTOPAR_SNAPSHOTS": f"{root}/node-{nodes[rank]}", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    Path(root, f"node-{nodes[rank]}").mkdir(exist_ok=True)
    mesh = DeviceMesh("cpu", list(range(len(nodes))), mesh_dim_names=("data",))

    def distribute(model: Any, batch: Any) -> Any:
        search = autopar.Search(recipe="random", seed=seed) if seed else autopar.Search(recipe="fsdp")
        return autopar.parallelize(model, mesh, batch, deterministic=True, timeout=WAIT, search=search)

    try:
        model, optimizer, scheduler, sampler, data = names["made"](distribute)
        run = autopar.elastic(model, optimizer, scheduler=scheduler, sampler=sampler, **settings)
    finally:
        for name in ("AUTOPAR_SNAPSHOTS", "LOCAL_RANK"):
            del os.environ[name]
        os.environ["LOCAL_WORLD_SIZE"] = local
    run.whole = model.full_state_dict
    run.accumulate = lambda step: names["accumulate"](step, model, optimizer, scheduler, sampler, data)
    return run, lambda: names["train"](model, optimizer, scheduler, sampler, data)


def go(
    rank: int, nodes: str, folder: str, seed: int, total: int, settings: dict[str, Any], accumulates: bool = False
) -> Any:
    """Losses of the steps of one start, and what the state was taken from; ranks beyond the world do nothing."""
    from torch.distributed import DeviceMesh

    if rank >= len(nodes):
        DeviceMesh("cpu", list(range(len(nodes))), mesh_dim_names=("data",))  # all processes make its groups
        return None
    run, train = started(rank, nodes, folder, seed, **settings)
    begins, source = run.step, run.source
    losses = {step: run.accumulate(step) if accumulates else train() for step in run.steps(total)}
    return begins, source, losses, run.whole()


def test_a_node_is_replaced(two_ranks: Ranks, tmp_path: Path) -> None:
    """The newcomer has nothing: what the lost node had comes from the copy of the other one."""
    losses: dict[int, float] = {}
    for nodes, total in (("ab", 2), ("ac", 4)):
        results = two_ranks.run(go, nodes, str(tmp_path), 0, total, {"copies": 1}, timeout=WAIT)
        assert [r[:2] for r in results] == [(len(losses), "memory" if losses else "start")] * 2
        losses |= results[0][2]
    values, _, state = expected(4)
    assert [losses[i] for i in range(4)] == pytest.approx(values, abs=1e-11)
    for name, value in state.items():
        torch.testing.assert_close(results[1][3][name], value, rtol=0, atol=1e-9)


def test_a_checkpoint_in_another_world(two_ranks: Ranks, tmp_path: Path) -> None:
    """Random numbers go on there, too: the loss curve is that of a run that nothing interrupted."""
    losses: dict[int, float] = {}
    settings = {"folder": str(tmp_path / "saved"), "save_every": 1}
    for nodes, total in (("ab", 2), ("c", 4)):
        results = two_ranks.run(go, nodes, str(tmp_path), 0, total, settings, timeout=WAIT)
        assert results[0][:2] == (len(losses), "checkpoint" if losses else "start")
        losses |= results[0][2]
    assert [losses[i] for i in range(4)] == pytest.approx(expected(4)[0], abs=1e-11)


ACCUMULATING = (("ab", 1), ("ac", 2), ("a", 5), ("ad", 7))


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("source", "seed"),
    [("checkpoint", 0), ("memory", SEED + 10), pytest.param("memory", 0, marks=pytest.mark.deep)],
)
def test_gradients_that_add_up_over_steps(two_ranks: Ranks, tmp_path: Path, source: str, seed: int) -> None:
    """They are part of the state, in memory and in checkpoints, reduced or not yet."""
    saved: dict[str, Any] = {"folder": str(tmp_path / "saved"), "save_every": 1}
    losses: dict[int, float] = {}
    for number, (nodes, total) in enumerate(ACCUMULATING):
        settings = {"copies": 1} if source == "memory" else saved
        nodes = nodes if source == "memory" else nodes.replace("a", str(number))
        results = two_ranks.run(go, nodes, str(tmp_path), seed and seed + number, total, settings, True, timeout=WAIT)
        assert results[0][:2] == (len(losses), source if losses else "start")
        losses |= results[0][2]
    values, _, state = expected(7, accumulates=True)
    assert [losses[i] for i in range(7)] == pytest.approx(values, abs=1e-11)
    for name, value in state.items():
        torch.testing.assert_close(results[0][3][name], value, rtol=0, atol=1e-9)


@pytest.mark.deep
def test_other_worlds_under_random_plans(ranks: Ranks, tmp_path: Path) -> None:
    losses: dict[int, float] = {}
    # Of a node that is lost, with all that it had, the next one has a copy.
    for seed, (nodes, total) in enumerate((("abcd", 2), ("abd", 4), ("abde", 5), ("ad", 7)), SEED):
        results = ranks.run(go, nodes, str(tmp_path), seed, total, {"copies": 1}, timeout=4 * WAIT)
        begins = len(losses), "memory" if losses else "start"
        assert [r[:2] for r in results[: len(nodes)]] == [begins] * len(nodes)
        losses |= results[0][2]
    values, _, state = expected(7)
    assert [losses[i] for i in range(7)] == pytest.approx(values, abs=1e-11)
    for name, value in state.items():
        torch.testing.assert_close(results[0][3][name], value, rtol=0, atol=1e-9)


def lost_shards(rank: int, folder: str) -> list[str]:
    """What is said where a shard is gone that nobody else has, without a checkpoint and with one."""
    from autopar.errors import AutoparError

    said = []
    for saved in (None, f"{folder}/saved"):
        settings = {} if saved is None else {"folder": saved, "save_every": 1}
        run, train = started(rank, "abcd", folder, 0, **settings)
        for step in run.steps(5):
            train()
            if step == 3:
                break
        torch.distributed.barrier()
        if rank == 2:
            for path in Path(folder, "node-c").iterdir():
                path.unlink()
        torch.distributed.barrier()
        try:
            run, _ = started(rank, "abcd", folder, 0, **settings)
            said.append(f"{run.source} {run.step}")
        except AutoparError as e:
            said.append(str(e))
        torch.distributed.barrier()
        if rank != 2:  # the next start begins anew
            for path in Path(folder, f"node-{'abcd'[rank]}").iterdir():
                path.unlink()
        torch.distributed.barrier()
    return said


@pytest.mark.deep
def test_shards_that_nobody_has(ranks: Ranks, tmp_path: Path) -> None:
    for without, with_folder in ranks.run(lost_shards, str(tmp_path), timeout=4 * WAIT):
        assert "of step 3 are lost with a node, and there is no checkpoint to go back to" in without
        assert "parts of 'model." in without and "copies=1" in without
        assert with_folder == "checkpoint 3"


def check(nodes: Nodes, total: int) -> None:
    """Every loss and learning rate is that of eager steps that nothing interrupted, and so are the parameters."""
    losses, rates, state = expected(total)
    done = nodes.facts("step")
    assert {f["step"] for f in done} == set(range(total))
    for f in done:
        assert abs(f["loss"] - losses[f["step"]]) < 1e-6 and f["lr"] == pytest.approx(rates[f["step"]], abs=1e-15), f
    for found in nodes.facts("state"):
        for name, value in state.items():
            torch.testing.assert_close(torch.tensor(found["state"][name]).double(), value, rtol=0, atol=1e-6)
    # Each start is where all had come to: what was in flight is done anew, and nothing else.
    first = [f for i, f in enumerate(nodes.starts()) if i]
    assert first and all(f["source"] == "memory" for f in first) and max(lost_steps(nodes.facts("time"))) <= 1


@pytest.mark.deep
def test_one_of_two_nodes_is_lost(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, 1, 2, 8, pause=0.2, stable=False)
    try:
        nodes.join(2)
        nodes.reach(2, world=2)
        nodes.lose(1)
        nodes.finish()
        check(nodes, 8)
        assert nodes.facts("state")[0]["world"] == 1
    finally:
        nodes.close()


@pytest.mark.deep
@pytest.mark.parametrize("settings", [{}, {"recipe": "fsdp", "copies": 2}], ids=["searched", "sharded"])
def test_four_three_four_two(settings: dict[str, Any], tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, 2, 4, 40, pause=0.5, **settings)
    try:
        nodes.join(4)
        nodes.reach(3, world=4)
        nodes.lose(1)
        nodes.reach(nodes.last_step() + 2, world=3)
        nodes.join()
        nodes.reach(nodes.last_step() + 2, world=4)
        nodes.lose(0)
        begun = nodes.processes()
        nodes.wait(lambda: nodes.processes() > begun, "processes that recover")
        nodes.lose(4)  # while they do
        nodes.finish()
        check(nodes, 40)
        assert {f["world"] for f in nodes.facts("state")} == {2}
    finally:
        nodes.close()
