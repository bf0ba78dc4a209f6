"""Pipelines on four ranks: three steps of AdamW with clipping equal one device's, whatever the schedule."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from autopar.costs.cluster import Cluster, DeviceGroup
from autopar.ir.layout import is_everywhere, is_held
from autopar.ir.signature import pytree
from autopar.pipeline.schedules import SCHEDULES
from tests.distributed.launch import WAIT, Ranks, mesh_of
from tests.distributed.steps import follow
from tests.pipeline.test_custom_schedule import BENT

pytestmark = pytest.mark.distributed

STEPS = 3


def train(
    rank: int,
    name: str,
    sizes: tuple[int, ...],
    pins: dict[str, Any],
    inputs: str = "global",
    cluster: Cluster | None = None,
) -> float:
    """The largest difference of loss, logits, gradients' norm, gradients or parameters."""
    from autopar.parallelize import parallelize
    from autopar.search.options import Search
    from tests.pipeline.test_pipelines import example

    (plain, batch), (model, _) = example(name), example(name)
    model, plain = model.double(), plain.double()
    batch = {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}
    search = Search(pins=pins)
    parallel: Any = parallelize(
        model, mesh_of(*sizes), batch, search=search, inputs=inputs, timeout=WAIT, cluster=cluster
    )
    if cluster is not None:
        plan = parallel._autopar.latest.plan
        assert plan.pipeline.places and {s.group for s in plan.stages} == {"a", "b"}
    mine = batch
    if inputs == "local":  # the last axis is that of the data
        assert (parallel.data_world_size, parallel.data_rank) == (sizes[-1], rank % sizes[-1])
        mine = {k: v.chunk(sizes[-1])[parallel.data_rank] for k, v in batch.items()}
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (parallel, plain)]
    worst = 0.0
    for _ in range(STEPS):
        found, expected = parallel(**mine), plain(**batch)
        require_apart(parallel, found)
        found["loss"].backward()
        expected["loss"].backward()
        norms = [torch.nn.utils.clip_grad_norm_(m.parameters(), 0.5) for m in (parallel, plain)]
        pairs = [(found["loss"], expected["loss"]), (norms[0].full_tensor(), norms[1])]
        pairs += [(found[k].full_tensor(), expected[k]) for k in ("logits", "out") if k in found]
        gradients = parallel.full_gradients()
        pairs += [(gradients[n], p.grad) for n, p in plain.named_parameters()]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        state = parallel.full_state_dict()
        pairs += [(state[n], value) for n, value in plain.state_dict().items() if n in state]
        worst = max(worst, *(float((a - b).detach().abs().max()) for a, b in pairs))
    with torch.no_grad():
        parallel.eval(), plain.eval()
        found, expected = parallel(**mine), plain(**batch)
        require_apart(parallel, found)
        pairs = [(found["loss"], expected["loss"])]
        pairs += [(found[k].full_tensor(), expected[k]) for k in ("logits", "out") if k in found]
    return max(worst, *(float((a - b).abs().max()) for a, b in pairs))


def require_apart(parallel: Any, found: dict[str, Any]) -> None:
    """Results that are no scalars take memory on the devices of one stage only."""
    layouts = [parallel._autopar.latest.plan.results[str(i)] for i in range(len(parallel._autopar.latest.plan.results))]
    results = [v for v in pytree.flatten(found, "results")[0]]
    assert len(results) == len(layouts)
    for value, layout in zip(results, layouts, strict=True):
        assert is_everywhere(layout) == (not value.ndim)
        if value.ndim and not is_held(layout, parallel._autopar.context.coordinates):
            assert value.to_local().untyped_storage().nbytes() == value.element_size()


MORE = [
    ("vit", (2, 2), "zb-h1"), ("vit", (4,), "gpipe"), ("vit", (2, 2), "looped-bfs"), ("vit", (2, 2), "zbv"),
    ("t5", (2, 2), "gpipe"), ("t5", (4,), "1f1b"), ("t5", (2, 2), "dualpipe-v"), ("unet", (2, 2), "dualpipe-v"),
    ("gpt2", (2, 2), "interleaved"), ("llama", (2, 2), "looped-bfs"),
]  # fmt: skip
"""Every model under every kind of schedule, for `make test-deep`."""


def deep(name: str, sizes: tuple[int, ...], schedule: str) -> Any:
    pins = {"stages": sizes[0], "virtual": 1 + SCHEDULES[schedule].interleaved, "microbatches": 4, "schedule": schedule}
    bound = 1e-10 if name == "unet" else 1e-5
    return pytest.param(name, sizes, pins, bound, marks=pytest.mark.deep, id=f"{name}-{schedule}-{len(sizes)}d")


@pytest.mark.parametrize(
    ("name", "sizes", "pins", "bound"),
    [
        *(deep(*case) for case in MORE),
        pytest.param("unet", (4,), {"stages": 4, "microbatches": 4}, 1e-10, marks=pytest.mark.deep),
        # A schedule as a table, on a factor of the axis.
        ("unet", (4,), {"stages": 2, "virtual": 2, "microbatches": 2, "schedule": BENT}, 1e-10),
        pytest.param(
            "unet", (2, 2), {"stages": 2, "virtual": 2, "microbatches": 2, "schedule": BENT}, 1e-10,
            marks=pytest.mark.deep,
        ),
        pytest.param("unet", (4,), {"stages": 2, "microbatches": 2}, 1e-10, marks=pytest.mark.deep),
        pytest.param(
            "gpt2", (2, 2), {"stages": 2, "microbatches": 4, "schedule": "zb-h1"}, 1e-5, marks=pytest.mark.deep
        ),
        pytest.param(
            "t5", (2, 2), {"stages": 2, "virtual": 2, "microbatches": 4, "schedule": "zbv"}, 1e-5,
            marks=pytest.mark.deep,
        ),
        pytest.param("llama", (2, 2), {"stages": 2, "microbatches": 8}, 1e-5, marks=pytest.mark.deep),
        pytest.param("vit", (2, 2), {"stages": 2, "virtual": 2, "microbatches": 4}, 1e-5, marks=pytest.mark.deep),
        pytest.param(
            "llama", (2, 2), {"stages": 2, "virtual": 2, "microbatches": 4, "schedule": "dualpipe-v"}, 1e-5,
            marks=pytest.mark.deep,
        ),
    ],
)  # fmt: skip
def test_three_steps(ranks: Ranks, name: str, sizes: tuple[int, ...], pins: dict[str, Any], bound: float) -> None:
    # Hugging Face's models compute their loss in float32.
    assert max(ranks.run(train, name, sizes, pins)) < bound


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "per_node", "pins", "inputs"),
    [
        ((2, 2), 2, {"stages": 2, "microbatches": 2, "batch.*": {"b": "S(0)"}}, "local"),
        pytest.param((2, 2), 2, {"stages": 2, "microbatches": 2}, "global", marks=pytest.mark.deep),
        pytest.param(
            (4,), 1, {"stages": 4, "microbatches": 4, "stage_order": [2, 0, 3, 1]}, "global", marks=pytest.mark.deep
        ),
        pytest.param((2, 2), 2, {"stages": 2, "virtual": 2, "microbatches": 4}, "global", marks=pytest.mark.deep),
    ],
)  # fmt: skip
def test_three_steps_on_devices_of_two_kinds(
    ranks: Ranks, sizes: tuple[int, ...], per_node: int, pins: dict[str, Any], inputs: str
) -> None:
    """Half of the devices are planned as three times as fast, and get more of the model; with ranks' own rows, too."""
    device, link = Cluster.preset("cpu").device, Cluster.preset("cpu").links[0]
    nodes = 2 // per_node
    groups = [
        DeviceGroup("a", device, nodes, per_node, (link, link)),
        DeviceGroup("b", device, nodes, per_node, (link, link), speed=3.0),
    ]
    cluster = Cluster.of_groups("two kinds", groups)
    assert max(ranks.run(train, "unet", sizes, pins, inputs, cluster)) < 1e-10


def under_a_plan_of_a_factor(rank: int) -> tuple[dict[str, int], float]:
    """Axes on which parameters lie, and the largest difference of a gradient; ranks that disagree are told so."""
    from autopar import RankError
    from autopar.compiler import plan as plan_for
    from autopar.parallelize import parallelize
    from autopar.search.options import Search
    from tests.pipeline.test_pipelines import example

    (plain, batch), (model, _), (other, _) = example("cnn"), example("cnn"), example("cnn")
    with pytest.raises(RankError, match=r"the axes of the mesh: rank 1 has .*pass the same plan= or search="):
        pins = {"stages": 2, "microbatches": 4} if rank == 1 else {}
        parallelize(other, mesh_of(4), batch, search=Search(pins=pins), timeout=WAIT)
    search = Search(pins={"stages": 2, "microbatches": 4})
    plan = plan_for(plain, batch, cluster="cpu", axes={"a": 4}, search=search)
    parallel: Any = parallelize(model, mesh_of(4), batch, plan=plan, timeout=WAIT)
    parallel(**batch).backward()
    plain(**batch).backward()
    found = parallel.full_gradients()
    mesh = next(iter(parallel.parameters())).device_mesh
    worst = max(float((found[n] - p.grad).abs().max()) for n, p in plain.named_parameters())
    return dict(zip(mesh.mesh_dim_names, mesh.shape, strict=True)), worst


@pytest.mark.deep
def test_a_plan_whose_stages_take_a_factor_of_an_axis(ranks: Ranks) -> None:
    for axes, worst in ranks.run(under_a_plan_of_a_factor):
        assert axes == {"a_stages": 2, "a": 2}
        assert worst < 1e-5


def under_way(rank: int, schedule: str) -> int:
    """How many microbatches this device's stages hold at most, in a step."""
    from autopar.parallelize import parallelize
    from autopar.pipeline.executor import StageRun
    from autopar.search.options import Search
    from tests.pipeline.test_pipelines import example
    from tests.search.pipeline.test_stage_memory import COUNT, VIRTUAL

    model, batch = example("cnn")
    pins = {"stages": 2, "virtual": VIRTUAL[schedule], "microbatches": COUNT, "schedule": schedule}
    parallel: Any = parallelize(model, mesh_of(2, 2), batch, search=Search(pins=pins), timeout=WAIT)
    forward, runs, most = StageRun.forward, dict[int, StageRun](), [0]

    def counted(self: StageRun, microbatch: int, received: Any) -> None:
        forward(self, microbatch, received)
        runs[self.stage] = self
        most[0] = max(most[0], sum(len(run._saved) for run in runs.values()))

    StageRun.forward = counted  # type: ignore[method-assign]
    try:
        parallel(**batch).backward()
    finally:
        StageRun.forward = forward  # type: ignore[method-assign]
    return most[0]


@pytest.mark.deep  # tests/search/pipeline/test_stage_memory.py emulates them
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_microbatches_under_way(ranks: Ranks, schedule: str) -> None:
    from tests.search.pipeline.test_stage_memory import under_way as expected

    found = ranks.run(under_way, schedule)
    assert found == [expected(schedule, device) for device in (0, 0, 1, 1)]


def sends_parts(rank: int) -> tuple[float, Any]:
    """How far three steps of Megatron's layouts are from one device's, and where the plan sends parts."""
    from autopar.parallelize import parallelize
    from autopar.search.options import Search
    from tests.passes.pipeline.test_scatter_sends import SLOW, residual
    from tests.search.pipeline.test_branch_and_bound import machine

    (plain, batch), (model, _) = residual(), residual()
    model, plain, rows = model.double(), plain.double(), {"x": batch["x"].double()}
    pins = {"stages": 2, "stage_axis": "node", "microbatches": 4, "virtual": 2, "schedule": "zbv"}
    search = Search(pins=pins, recipe="megatron", roles={"gpu": "tensor"})
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "gpu"))
    parallel: Any = parallelize(model, mesh, cluster=machine(SLOW), search=search, timeout=WAIT)
    worst = follow(parallel, plain, STEPS * [rows])
    return worst, parallel.plan.scatter


@pytest.mark.slow
def test_parts_are_sent(ranks: Ranks) -> None:
    for worst, scatter in ranks.run(sends_parts):
        assert scatter.behind == (0, 2)
        assert worst < 1e-10


@pytest.mark.deep
def test_each_rank_passes_its_own_rows(ranks: Ranks) -> None:
    pins = {"stages": 2, "microbatches": 2, "batch.*": {"b": "S(0)"}}
    assert max(ranks.run(train, "unet", (2, 2), pins, "local")) < 1e-10


def chosen(rank: int, recipe: str | None, seed: int, sizes: tuple[int, ...] = (2, 2)) -> tuple[float, str]:
    """How far three steps are from one device's, the last of fewer samples; and the pipeline, which nobody named."""
    from autopar.parallelize import parallelize
    from autopar.search.options import Search
    from tests.search.pipeline.test_branch_and_bound import MANY, Deep, machine

    model, plain = Deep(MANY).double(), Deep(MANY).double()
    few = {"stages": "search", "virtual": 1, "microbatches": 4} if recipe is None else {"stages": 2}
    pins = {**few, "recompute": "search"}
    search = Search(pins=pins, recipe=recipe, seed=seed)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("node", "gpu")[: len(sizes)])
    parallel: Any = parallelize(model, mesh, cluster=machine(3e7), search=search, timeout=WAIT)
    rows = torch.randn(32, 256, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    worst = follow(parallel, plain, [{"x": x} for x in (rows, rows.flip(0), rows[:16])])
    return worst, str(parallel.plan.pipeline)


@pytest.mark.deep
@pytest.mark.parametrize(("sizes", "axis"), [((2, 2), "'node'"), ((4,), "'node_stages'")])
def test_a_pipeline_that_the_search_chooses(ranks: Ranks, sizes: tuple[int, ...], axis: str) -> None:
    for worst, pipeline in ranks.run(chosen, None, 0, sizes):
        assert axis in pipeline
        assert worst < 1e-10


def apart(rank: int) -> float:
    """How far three steps are from one device's, where alike layers of two stages lie in other ways."""
    from autopar.parallelize import parallelize
    from autopar.search.options import Search
    from tests.search.pipeline.test_branch_and_bound import Deep, layouts_by_stage

    model, plain = Deep().double(), Deep().double()
    search = Search(pins=layouts_by_stage(), tie_layers=False)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "gpu"))
    parallel: Any = parallelize(model, mesh, search=search, timeout=WAIT)
    rows = torch.randn(32, 256, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    worst = follow(parallel, plain, STEPS * [{"x": rows}], clip=0.1)
    assert len({str(p.placements) for n, p in parallel.named_parameters() if n.endswith("weight")}) == 2
    return worst


@pytest.mark.slow
def test_layouts_differ_between_stages(ranks: Ranks) -> None:
    assert max(ranks.run(apart)) < 1e-10


@pytest.mark.deep
@pytest.mark.parametrize("seed", [1, 2, pytest.param(3, marks=pytest.mark.deep)])
def test_random_pipelines(ranks: Ranks, seed: int) -> None:
    for worst, pipeline in ranks.run(chosen, "random", seed):
        assert "Pipeline" in pipeline
        assert worst < 1e-10


@pytest.mark.deep
@pytest.mark.parametrize("seed", range(1, 5))
def test_random_pipelines_on_a_factor_of_an_axis(ranks: Ranks, seed: int) -> None:
    for worst, pipeline in ranks.run(chosen, "random", seed, (4,)):
        assert "node_stages" in pipeline
        assert worst < 1e-10


def mixed_up(rank: int, inputs: str) -> str:
    """The error where the two ranks of a pipeline pass different rows."""
    from autopar.errors import RankError
    from autopar.parallelize import parallelize
    from autopar.search.options import Search
    from tests.pipeline.test_pipelines import example

    model, batch = example("mlp")
    pins = {"stages": 2, "microbatches": 2, "batch.*": {"b": "S(0)"}}
    parallel: Any = parallelize(model, mesh_of(2, 2), batch, search=Search(pins=pins), inputs=inputs, timeout=WAIT)
    mine = batch if inputs == "global" else {k: v.chunk(2)[parallel.data_rank] for k, v in batch.items()}
    with pytest.raises(RankError) as error:
        parallel(**{k: v.roll(1, 0) if rank == 3 else v for k, v in mine.items()})
    assert parallel(**mine).isfinite()  # and goes on
    return str(error.value)


@pytest.mark.parametrize(("inputs", "other"), [pytest.param("global", 0, marks=pytest.mark.deep), ("local", 1)])
def test_ranks_of_a_pipeline_pass_the_same_rows(ranks: Ranks, inputs: str, other: int) -> None:
    for message in ranks.run(mixed_up, inputs):
        assert message.startswith("the batch's contents differ: rank 3 has "), message
        assert f"rank {other} has" in message
        assert "model.data_rank" in message


def reload(rank: int) -> float:
    """How far a step behind a checkpoint, in another pipeline, is from the step that went on."""
    import autopar.checkpoint
    from autopar.parallelize import parallelize
    from autopar.search.options import Search
    from tests.pipeline.test_pipelines import example

    losses, states = [], []
    for pins in ({"stages": 4, "microbatches": 4}, {"stages": 2, "microbatches": 2}):
        model, batch = example("unet")
        mesh = mesh_of(4) if pins["stages"] == 4 else mesh_of(2, 2)
        parallel: Any = parallelize(model, mesh, batch, search=Search(pins=pins), timeout=WAIT)
        optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2)
        if states:
            parallel.load_full_state_dict(states[0])
        else:
            parallel(**batch)["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()
            states.append({n: v.clone() for n, v in parallel.full_state_dict().items()})
            saved = autopar.checkpoint.state_dict(parallel, optimizer)
            file = io.BytesIO()
            torch.save({n: v.full_tensor() for n, v in saved["model"].items()}, file)
            file.seek(0)
            again = torch.load(file)
            assert all(torch.equal(again[n], v) for n, v in states[0].items())
            autopar.checkpoint.load_state_dict(parallel, optimizer, saved)
        losses.append(float(parallel(**batch)["loss"].detach()))
    return abs(losses[0] - losses[1])


@pytest.mark.slow
def test_a_checkpoint_goes_into_another_pipeline(ranks: Ranks) -> None:
    assert max(ranks.run(reload)) < 1e-6


def fail(rank: int) -> str:
    """The error of a rank where another one's stage raises."""
    from autopar.parallelize import parallelize
    from autopar.search.options import Search
    from tests.pipeline.test_pipelines import example

    model, batch = example("unet")
    parallel: Any = parallelize(
        model, mesh_of(4), batch, search=Search(pins={"stages": 4, "microbatches": 4}), timeout=5
    )
    parallel(**batch)
    if rank == 2:

        def broken(*_: Any) -> Any:
            raise RuntimeError("out of memory, say")

        step = parallel._autopar.latest.step
        parallel._autopar.options.compiler._graphs[step.stage_graphs.microbatch_graph(2, "F").graph] = broken
    try:
        parallel(**batch)
    except Exception as e:
        return f"{type(e).__name__}: {e}"
    return ""


@pytest.mark.deep
def test_ranks_end_when_a_stage_raises() -> None:
    ranks = Ranks()
    try:
        errors = ranks.run(fail)
    finally:
        ranks.close()
    assert "out of memory" in errors[2]
    assert all(error.startswith("RankError: ") for rank, error in enumerate(errors) if rank != 2), errors
