"""Parameters that do not divide are stored in uneven parts, and train as on one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from tests.distributed.launch import WAIT, Ranks, mesh_of
from tests.distributed.models import slow_devices

pytestmark = pytest.mark.distributed

STEPS = 3
TOLERANCE = 1e-9
VOCAB, FFN, ODD = 27, 30, 31
PADDED = {"embed.weight", "up.weight", "up.bias", "down.weight", "head.weight", "head.bias"}

# Where parameters are split unevenly; on the square mesh along its last axis.
PINS: dict[str, dict[str, str]] = {
    "vocabulary": {"embed.weight": "S(0)", "head.weight": "S(0)"},
    "columns": {"up.weight": "S(0)", "up.bias": "S(0)", "down.weight": "S(1)"},
    "searched": {},
}
LINE, SQUARE = (4,), (2, 2)
SHORT = (("vocabulary", LINE),)
REST = (*((name, SQUARE) for name in PINS), ("columns", LINE), ("searched", LINE))


class Tokens(nn.Module):
    """An embedding, two layers and a vocabulary that four does not divide."""

    def __init__(self, ffn: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 8)
        self.up, self.down = nn.Linear(8, ffn), nn.Linear(ffn, 8)
        self.head = nn.Linear(8, VOCAB)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.embed(ids)
        logits = self.head(x + self.down(torch.sigmoid(self.up(x))))
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def make(ffn: int = FFN) -> nn.Module:
    torch.manual_seed(0)
    return Tokens(ffn).double()


def batch(step: int, rows: int = 8) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, VOCAB, (rows, 4), generator=torch.Generator().manual_seed(step))
    return {"ids": ids, "labels": ids.roll(1, 1)}


def steps(model: nn.Module, count: int = STEPS) -> list[float]:
    """Losses of some steps; a shorter last batch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(count):
        loss = model(**batch(step, 8 if step < count - 1 else 4))["loss"]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def parallel(mesh: Any, pins: dict[str, str], **options: Any) -> Any:
    from autopar.parallelize import parallelize
    from autopar.search.options import Search

    last = {name: ("R",) * (mesh.ndim - 1) + (text,) for name, text in pins.items()}
    model = options.pop("model", None) or make()
    search = Search(pins=last)
    return parallelize(model, mesh, batch(0), search=search, cluster=slow_devices(), timeout=WAIT, **options)


def train(rank: int, plans: Any) -> dict[str, Any]:
    plain = make()
    expected_losses = steps(plain)
    expected = plain.state_dict()
    plain.eval()
    with torch.no_grad():
        logits = plain(**batch(9, 6))["logits"]
    found: dict[str, Any] = {}
    for name, sizes in plans:
        model = parallel(mesh_of(*sizes), PINS[name])
        losses = steps(model)
        state = model.full_state_dict()
        error = max(float((state[k] - v).abs().max()) for k, v in expected.items())
        error = max(error, *(abs(a - b) for a, b in zip(losses, expected_losses, strict=True)))
        model.eval()
        with torch.no_grad():  # a shape that is planned under the same uneven parts
            again = model(**batch(9, 6))["logits"]
        error = max(error, float((again.full_tensor() - logits).abs().max()))
        local = {n: tuple(p.to_local().shape) for n, p in model.named_parameters()}
        shapes = {n: tuple(p.shape) for n, p in model.named_parameters()}
        found[f"{name} {sizes}"] = error, local, shapes, dict(model.plan.padding), tuple(again.shape)
    return found


@pytest.mark.parametrize("plans", [SHORT, pytest.param(REST, marks=pytest.mark.deep)], ids=["short", "rest"])
def test_training(ranks: Ranks, plans: Any) -> None:
    found = ranks.run(train, plans)
    whole = {n: tuple(p.shape) for n, p in make().named_parameters()}
    for rank, plans in enumerate(found):
        for name, (error, local, shapes, padding, logits) in plans.items():
            assert error < TOLERANCE, f"{name}, rank {rank}: {error}"
            assert shapes == whole
            assert logits == (6, 4, VOCAB)
            if name == "vocabulary (4,)":
                assert padding["head.weight"] == (28, 8)
                assert local["head.weight"] == local["embed.weight"] == (7 if rank < 3 else 6, 8)
            if name == "vocabulary (2, 2)":
                assert local["head.weight"] == (14 - rank % 2, 8)
            if name == "columns (4,)":
                assert padding["down.weight"] == (8, 32)
                assert (local["up.weight"], local["up.bias"], local["down.weight"]) == (
                    ((8, 8), (8,), (8, 8)) if rank < 3 else ((6, 8), (6,), (8, 6))
                )


def one_step(model: nn.Module) -> torch.Tensor:
    """The loss of a step that leaves the gradients there."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loss: torch.Tensor = model(**batch(0))["loss"]
    loss.backward()
    optimizer.step()
    return loss.detach()


def follow_random_plans(rank: int, seeds: tuple[int, ...]) -> list[tuple[dict[str, float], Any, Any]]:
    """Of each seed's plan: errors, padded shapes of parameters, and shapes of their local parts."""
    from autopar.parallelize import parallelize
    from autopar.search.options import Search

    plain = make(ODD)
    wanted = {"loss": one_step(plain), **plain.state_dict()}
    wanted |= {f"gradient of {n}": p.grad for n, p in plain.named_parameters()}
    found = []
    for seed in seeds:
        search = Search(recipe="random", seed=seed)
        model = parallelize(make(ODD), mesh_of(2), batch(0), search=search, cluster=slow_devices(), timeout=WAIT)
        have = {"loss": one_step(model), **model.full_state_dict()}
        have |= {f"gradient of {n}": g for n, g in model.full_gradients().items()}
        assert have.keys() == wanted.keys()
        errors = {n: float((have[n] - v).abs().max()) for n, v in wanted.items()}
        local = {n: tuple(p.to_local().shape) for n, p in model.named_parameters()}
        found.append((errors, dict(model.plan.padding), local))
    return found


@pytest.mark.deep
def test_random_plans_with_padding(two_ranks: Ranks) -> None:
    found = two_ranks.run(follow_random_plans, (11, 21))
    uneven = set()
    for (errors, padding, local), (others_errors, _, others_local) in zip(*found, strict=True):
        assert max(*errors.values(), *others_errors.values()) < TOLERANCE, (errors, others_errors)
        assert padding.keys() == PADDED
        uneven |= {n for n in local if local[n] != others_local[n]}
    assert len(uneven) > 3, uneven


def round_trip(rank: int, folder: str) -> float:
    """Saved in uneven parts along one axis, loaded along another, values from files and functions too."""
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import save_file

    from autopar import checkpoint

    models = []
    for sizes, name in (((4,), "vocabulary"), ((2, 2), "columns")):
        model = parallel(mesh_of(*sizes), PINS[name])
        models.append((model, torch.optim.AdamW(model.parameters(), lr=1e-2)))
    source, target = models
    source[0](**batch(0))["loss"].backward()
    source[1].step()
    dcp.save(checkpoint.state_dict(*source), checkpoint_id=folder)
    state = checkpoint.state_dict(*target)
    dcp.load(state, checkpoint_id=folder)
    checkpoint.load_state_dict(*target, state)
    worst = 0.0
    for model, optimizer in models:
        optimizer.zero_grad()
        model(**batch(1))["loss"].backward()
        optimizer.step()
    expected, found = source[0].full_state_dict(), target[0].full_state_dict()
    worst = max(float((found[k] - v).abs().max()) for k, v in expected.items())
    file = f"{folder}.{rank}.safetensors"
    save_file({k: v.contiguous() for k, v in expected.items()}, file)
    filled: tuple[Any, ...] = (file, lambda name, tensor: tensor.copy_(expected[name]))
    for init, name in zip(filled, ("vocabulary", "columns"), strict=True):
        with torch.device("meta"):
            empty = make()
        model = parallel(mesh_of(4), PINS[name], model=empty, init=init)
        found = model.full_state_dict()
        worst = max(worst, *(float((found[k] - v).abs().max()) for k, v in expected.items()))
        model.load_full_state_dict({k: 2 * v for k, v in expected.items()})
        found = model.full_state_dict()
        worst = max(worst, *(float((found[k] - 2 * v).abs().max()) for k, v in expected.items()))
    return worst


@pytest.mark.deep
def test_round_trip(ranks: Ranks, tmp_path: Path) -> None:
    assert max(ranks.run(round_trip, str(tmp_path / "saved"))) < 1e-12


def train_heads(rank: int, kind: str, grouped: bool) -> tuple[dict[str, Any], float]:
    """Padding of the plan, and how far three steps are from eager ones: losses, and parameters after them."""
    from autopar.parallelize import parallelize
    from autopar.search.options import Search
    from tests.passes import test_pad_dims

    plain, model = (getattr(test_pad_dims, kind)(grouped).double() for _ in range(2))
    given = [torch.randn(2, 64, 8, generator=torch.Generator().manual_seed(i)).double() for i in range(STEPS)]
    found = parallelize(
        model, mesh_of(4), (given[0],), search=Search(roles={"a": "tensor"}), cluster=slow_devices(), memory="1GiB",
        timeout=WAIT,
    )  # fmt: skip
    apart = 0.0
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (plain, found)]
    for x in given:
        losses = [m(x) for m in (plain, found)]
        apart = max(apart, abs(float(losses[0]) - float(losses[1])))
        for loss, optimizer in zip(losses, optimizers, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    state = found.full_state_dict()
    apart = max(apart, *(float((p - state[n]).abs().max()) for n, p in plain.state_dict().items()))
    return dict(found.plan.padding), apart


@pytest.mark.deep
@pytest.mark.parametrize(
    ("kind", "grouped"),
    [("OwnWeights", False), ("OwnWeights", True), ("Masked", False), ("Masked", True), ("Sloped", False)],
)
def test_heads(ranks: Ranks, kind: str, grouped: bool) -> None:
    """Three heads on four ranks, under the role tensor."""
    for padding, apart in ranks.run(train_heads, kind, grouped):
        assert padding["out.weight"] == (8, 32 if grouped else 16)
        assert apart < TOLERANCE


class Beside(nn.Module):
    """An adapter beside a layer."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner, self.down = inner, nn.Linear(inner.in_features, 3, bias=False).double()
        self.up = nn.Linear(3, inner.out_features, bias=False).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.inner(x) + self.up(self.down(x))
        return found


def odd() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 15), nn.Tanh(), nn.Linear(15, 4)).double()


RENAMED: dict[str, Any] = {
    "pruned": lambda m: prune.l1_unstructured(m[0], "weight", 0.3),  # type: ignore[no-untyped-call]
    "normed": lambda m: nn.utils.parametrizations.weight_norm(m[2]),
    "adapted": lambda m: m.__setitem__(0, Beside(m[0])),
}


def rename(rank: int) -> dict[str, float]:
    """How far losses, gradients and parameters are from eager ones after padded parameters have other names."""
    from autopar.parallelize import parallelize
    from autopar.search.options import Search

    found: dict[str, float] = {}
    x = torch.randn(6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for name, change in RENAMED.items():
        search = Search(pins={"0.weight": ("S(0)",), "2.weight": ("S(1)",)})
        both: list[Any] = [odd(), parallelize(odd(), mesh_of(2), search=search, timeout=WAIT)]
        kept: list[list[torch.Tensor]] = [[], []]
        for model, tensors in zip(both, kept, strict=True):
            for step in range(3):
                if step == 1:
                    torch.manual_seed(2)
                    change(model)
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                optimizer.zero_grad()
                loss = model(x).square().mean()
                loss.backward()
                optimizer.step()
                now = [loss, *(p.grad for p in model.parameters()), *model.parameters()]
                tensors += [(t.full_tensor() if hasattr(t, "full_tensor") else t).detach().clone() for t in now]
        assert both[1].plan.padding, name
        found[name] = max(float((a - b).abs().max()) for a, b in zip(*kept, strict=True))
    return found


@pytest.mark.slow
def test_parameters_that_get_another_name(two_ranks: Ranks) -> None:
    for found in two_ranks.run(rename):
        assert max(found.values()) < TOLERANCE, found
