"""State dicts by original name; tests/distributed/test_round_trip.py saves and loads them on several meshes."""

from __future__ import annotations

import copy
import json
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autopar import checkpoint
from autopar.errors import AutoparError
from autopar.parallelize import parallelize
from autopar.runtime.checkpoint import folders
from autopar.runtime.checkpoint.manifest import DIGEST, _digest


def trained(steps: int) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = parallelize(nn.Linear(4, 2), None, loss_fn=lambda output, batch: output.square().mean())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(steps):
        step(model, optimizer)
    return model, optimizer


def step(model: Any, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(3, 4)).backward()
    optimizer.step()
    optimizer.zero_grad()


def test_a_fresh_model_goes_on_where_the_saved_one_was() -> None:
    model, optimizer = trained(2)
    state = copy.deepcopy(checkpoint.state_dict(model, optimizer))
    assert set(state["optimizer"]["state"]) == {"weight", "bias"}
    other, fresh = trained(0)
    checkpoint.load_state_dict(other, fresh, state)
    step(model, optimizer)
    step(other, fresh)
    assert torch.equal(model.weight, other.weight)


def test_making_the_state_changes_nothing() -> None:
    model, optimizer = trained(0)
    before = model.full_state_dict()
    state = checkpoint.state_dict(model, optimizer)
    assert all(torch.equal(v, before[k]) for k, v in model.full_state_dict().items())
    assert all(float(v["step"]) == 0 for v in state["optimizer"]["state"].values())
    assert model.weight.grad is None and not optimizer.state


OPTIMIZERS = {
    "SGD": {"momentum": 0.9, "weight_decay": 0.1, "dampening": 0.5},
    "Adam": {"weight_decay": 0.1, "amsgrad": True},
    "AdamW": {},
    "NAdam": {},
    "RAdam": {"weight_decay": 0.1},
    "Adamax": {"weight_decay": 0.1},
    "RMSprop": {"weight_decay": 0.1, "momentum": 0.9, "centered": True},
    "Adagrad": {"weight_decay": 0.1},
    "Adadelta": {"weight_decay": 0.1},
    "Rprop": {},
    "ASGD": {},
    "Adafactor": {},
}


@pytest.mark.some(2)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_saved_before_the_first_step(tmp_path: Path, name: str) -> None:
    """It has no state then, and none after loading: not one of zeros, or of weight decay, which are none of its own."""

    def made() -> tuple[Any, Any]:
        model = trained(0)[0]
        return model, getattr(torch.optim, name)(model.parameters(), lr=0.1, **OPTIMIZERS[name])

    def run(model: Any, optimizer: Any) -> Any:
        for _ in range(3):
            step(model, optimizer)
        return model.full_state_dict()["weight"]

    plain = torch.nn.Linear(4, 2)
    plain.load_state_dict(made()[0].full_state_dict())
    reference = getattr(torch.optim, name)(plain.parameters(), lr=0.1, **OPTIMIZERS[name])
    for _ in range(3):
        plain(torch.ones(3, 4)).square().mean().backward()
        reference.step(), reference.zero_grad()
    called: list[Any] = []
    model, optimizer = made()
    checkpoint.state_dict(model, optimizer)
    checkpoint.save(tmp_path, model, optimizer)
    other, fresh = made()
    fresh.register_step_pre_hook(lambda *_: called.append(1))
    checkpoint.load(tmp_path, other, fresh)
    assert not called
    for each in ((model, optimizer), (other, fresh)):
        torch.testing.assert_close(run(*each), plain.weight.detach())
    # Into one that has stepped.
    checkpoint.load(tmp_path, other, fresh)
    torch.testing.assert_close(run(other, fresh), plain.weight.detach())


def test_state_of_parameters_that_are_frozen_by_now(tmp_path: Path) -> None:
    """They are trained again later."""
    model, optimizer = trained(2)
    model.bias.requires_grad_(False)
    step(model, optimizer)
    checkpoint.save(tmp_path, model, optimizer)
    other, fresh = trained(0)
    other.bias.requires_grad_(False)
    checkpoint.load(tmp_path, other, fresh)
    for each in (model, other):
        each.bias.requires_grad_(True)
    step(model, optimizer), step(other, fresh)
    assert all(torch.equal(v, other.full_state_dict()[n]) for n, v in model.full_state_dict().items())


def test_loading_that_fails_makes_no_state(tmp_path: Path) -> None:
    model, optimizer = trained(1)
    checkpoint.save(tmp_path, model, optimizer)
    other = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with pytest.raises(AutoparError, match="of another model, optimizer"):
        checkpoint.load(tmp_path, model, other)
    assert not other.state
    # Without state optimizers are told apart by their options.
    checkpoint.save(tmp_path, model, other)
    with pytest.raises(AutoparError, match="of another model, optimizer"):
        checkpoint.load(tmp_path, model, torch.optim.AdamW(model.parameters()))


def test_optimizers_whose_state_is_of_no_parameter(tmp_path: Path) -> None:
    model, optimizer = trained(1)
    optimizer.state["steps"] = {"count": 1}
    with pytest.raises(AutoparError, match="AdamW has a state of 'steps', which is no parameter"):
        checkpoint.save(tmp_path, model, optimizer)
    with pytest.raises(AutoparError, match=r"LBFGS cannot be saved or loaded: its step\(\) takes a closure"):
        checkpoint.save(tmp_path, model, torch.optim.LBFGS(model.parameters()))


def test_an_optimizer_of_another_model_is_refused() -> None:
    model, _ = trained(0)
    with pytest.raises(AutoparError, match="does not have"):
        checkpoint.state_dict(model, torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1))


def test_a_run_goes_on_from_a_folder(tmp_path: Path) -> None:
    """Random numbers, scheduler and what the loop keeps included."""

    def made() -> tuple[Any, Any, Any]:
        model, optimizer = trained(0)
        return model, optimizer, torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4])

    def run(model: Any, optimizer: Any, scheduler: Any) -> list[torch.Tensor]:
        for _ in range(3):
            model(torch.randn(3, 4)).backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        return [p.detach().clone() for p in model.parameters()]

    for wait in (True, False):
        model, optimizer, scheduler = made()
        run(model, optimizer, scheduler)
        saving = checkpoint.save(
            tmp_path / "run", model, optimizer, step=3, extra={"epoch": 1}, wait=wait, scheduler=scheduler
        )
        expected = run(model, optimizer, scheduler)
        assert saving.wait() == saving.folder and saving.done()
        other = made()
        found = checkpoint.load(tmp_path / "run", other[0], other[1], scheduler=other[2])
        assert (found.step, found.extra, found.same_random_numbers) == (3, {"epoch": 1}, True)
        assert found.folder == saving.folder
        assert all(torch.equal(a, b) for a, b in zip(run(*other), expected, strict=True))
        assert other[2].state_dict() == scheduler.state_dict()
        assert type(other[2].milestones) is type(scheduler.milestones)
    assert len(folders.whole(tmp_path / "run")) == 2
    assert not [p for p in (tmp_path / "run").rglob("*") if p.suffix in (".pkl", ".pt", ".metadata")]


class Branches(nn.Module):
    """Of two layers, one has a gradient when it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.always, self.later, self.never = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        return (self.always(x) + (self.later(x) if both else 0.0)).square().mean()


@pytest.mark.slow
def test_parameters_without_gradients_so_far(tmp_path: Path) -> None:
    """They have no state in the optimizer, and none after loading: what begins later begins as in the first run."""

    def made() -> tuple[Any, Any]:
        model = parallelize(Branches(), None, loss=lambda out: out)
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    def train(model: Any, optimizer: Any, both: bool) -> None:
        model(torch.ones(3, 4), both).backward()
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer = made()
    train(model, optimizer, False)
    checkpoint.save(tmp_path, model, optimizer, step=1)
    train(model, optimizer, True)
    other, fresh = made()
    for _ in range(2):  # the second time into an optimizer that has more state than was saved
        checkpoint.load(tmp_path, other, fresh)
        assert len(fresh.state) == 2
        train(other, fresh, True)
        assert all(torch.equal(a, b) for a, b in zip(other.parameters(), model.parameters(), strict=True))
    sgd = torch.optim.SGD(other.parameters(), lr=0.1)
    checkpoint.save(tmp_path, other, sgd, step=2)
    with pytest.raises(AutoparError, match=r"it has no optimizer\.always\.weight\.step"):
        checkpoint.load(tmp_path, other, fresh)


def test_a_checkpoint_of_something_else_changes_nothing(tmp_path: Path) -> None:
    model, optimizer = trained(1)
    checkpoint.save(tmp_path, model, step=1)
    with pytest.raises(AutoparError, match="has no optimizer: it was saved without one"):
        checkpoint.load(tmp_path, model, optimizer)
    checkpoint.save(tmp_path, model, optimizer, step=2)
    torch.manual_seed(1)
    wider = parallelize(nn.Linear(4, 3), None, loss_fn=lambda output, batch: output.square().mean())
    before = wider.weight.detach().clone()
    message = r"model\.weight is \['float32', 2, 4\] there and \['float32', 3, 4\] here; .*it has no sampler="
    with pytest.raises(AutoparError, match=message):
        checkpoint.load(tmp_path, wider, sampler=torch.amp.GradScaler("cpu"))
    assert torch.equal(wider.weight, before)
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        checkpoint.load(tmp_path / "other", model)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"folder": 3}, "folder=3: expected a path"),
        ({"model": nn.Linear(2, 2)}, r"expected what parallelize\(\) returned"),
        ({"step": -1}, "step=-1: expected a whole number from 0"),
        ({"keep": True}, "keep=True: expected a whole number from 1"),
        ({"scheduler": 0.1}, r"scheduler=0\.1: expected an object with state_dict\(\) and load_state_dict\(\)"),
        ({"extra": {"f": print}}, r"extra\['f'\] is a builtin_function_or_method, which cannot be saved"),
    ],
)
def test_wrong_arguments(tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
    model, _ = trained(0)
    with pytest.raises(ValueError, match=message):
        checkpoint.save(**{"folder": tmp_path, "model": model, **arguments})
    assert not list(tmp_path.iterdir())


def _same(text: str, other: str) -> bool:
    try:
        return bool(json.loads(text) == json.loads(other))
    except ValueError:
        return False


def test_a_damaged_manifest_is_an_error(tmp_path: Path) -> None:
    model, _ = trained(0)
    folder = checkpoint.save(tmp_path, model).folder
    whole, draw = (folder / folders.MANIFEST).read_text(), random.Random(0)
    for _ in range(200):
        i = draw.randrange(len(whole))
        mutated = draw.choice(
            [whole[:i], whole[:i] + whole[i + 1 :], whole[:i] + draw.choice('{}[]",x0\xff') + whole[i:]]
        )
        (folder / folders.MANIFEST).write_text(mutated, encoding="utf-8")
        if not _same(mutated, whole):  # spaces are of no account
            with pytest.raises(ValueError, match=r"autopar\.json is damaged"):
                checkpoint.load(tmp_path, model)
    (folder / folders.MANIFEST).write_text(whole)
    shard = next(folder.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:100])
    with pytest.raises(AutoparError, match="could not be read: rank 0"):
        checkpoint.load(tmp_path, model)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("values", "optimizer"), None, r"values: Expected `object`, got `null` - at `\$.optimizer`"),
        (("values", "groups"), 3, r"values: Expected `object`, got `int` - at `\$.groups`"),
        (("values", "groups"), {"dict": []}, r"values: of optimizer and groups, which an optimizer has both"),
        (("values", "model"), {"list": []}, r"values: Expected `object`, got `array` - at `\$.model`"),
        (("values", "alike"), 1.5, r"values: Expected `array`, got `float` - at `\$.alike`"),
        (("step",), float("inf"), r"Expected `int`, got `float` - at `\$.step`"),
        (("world",), 0, r"Expected `int` >= 1 - at `\$.world`"),
        (("tensors",), {"model.bias": []}, r"Expected `array` of length >= 1 - at `\$.tensors\[...\]`"),
    ],
)
def test_a_manifest_that_somebody_has_written(tmp_path: Path, path: tuple[str, ...], value: Any, message: str) -> None:
    """With a digest of its own."""
    model, _ = trained(0)
    change(checkpoint.save(tmp_path, model).folder / folders.MANIFEST, path, value)
    with pytest.raises(ValueError, match=r"autopar\.json is damaged: .*" + message):
        checkpoint.load(tmp_path, model)


def test_a_manifest_with_a_schedulers_state_of_another_type(tmp_path: Path) -> None:
    model, optimizer = trained(0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    file = checkpoint.save(tmp_path, model, optimizer, scheduler=scheduler).folder / folders.MANIFEST
    change(file, ("values", "stateful"), {"dict": [["scheduler", 3]]})
    with pytest.raises(
        AutoparError, match="another model, optimizer or loop: scheduler= is a int there and a dict here"
    ):
        checkpoint.load(tmp_path, model, optimizer, scheduler=scheduler)
    change(file, ("values", "extra"), {"x" * 5000: 1})
    with pytest.raises(ValueError, match=r"is damaged: .*KeyError: 'x+ \.\.\. x+") as raised:
        checkpoint.load(tmp_path, model)
    assert len(str(raised.value)) < 600 + len(str(file))  # of the name its ends


@pytest.mark.parametrize("kind", ["model", "optimizer"])
def test_a_manifest_with_foreign_names(tmp_path: Path, kind: str) -> None:
    model, optimizer = trained(1)
    change(
        checkpoint.save(tmp_path, model, optimizer).folder / folders.MANIFEST,
        ("values", kind),
        {"dict": [["foreign", {"dict": []}]]},
    )
    before = {n: t.clone() for n, t in model.state_dict().items()}
    with pytest.raises(AutoparError, match=f"is of another model, optimizer or loop: this {kind} has no foreign"):
        checkpoint.load(tmp_path, model, optimizer)
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())


def change(file: Path, path: tuple[str, ...], value: Any) -> None:
    """Change a manifest, which gets a digest of its own."""
    changed: dict[str, Any] = json.loads(file.read_text())
    del changed[DIGEST]
    holder = changed
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = value
    file.write_text(json.dumps({**changed, DIGEST: _digest(changed)}))


LOOP = """
import sys, torch
from torch import nn
from autopar import checkpoint
from autopar.parallelize import parallelize

model = parallelize(nn.Linear(64, 64), None, loss_fn=lambda output, batch: output.square().mean())
optimizer = torch.optim.AdamW(model.parameters())
for step in range(1, 10000):
    model(torch.ones(2, 64)).backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        model.bias.fill_(step)
    checkpoint.save(sys.argv[1], model, optimizer, step=step, wait=step % 2 == 0)
    print(step, flush=True)
"""


def kill_and_load(folder: Path, kills: int) -> None:
    """Start the loop and kill it at a random moment after its first save, several times."""
    draw, model = random.Random(0), parallelize(nn.Linear(64, 64), None, loss_fn=lambda o, b: o.square().mean())
    for i in range(kills):
        root = folder / str(i)
        loop = subprocess.Popen([sys.executable, "-c", LOOP, str(root)], stdout=subprocess.PIPE, text=True)
        assert loop.stdout is not None and loop.stdout.readline() == "1\n"
        saved = loop.stdout.readline()  # the second save has waited for the first
        time.sleep(draw.random() * 0.3)
        loop.kill()
        saved = (saved + loop.stdout.read()).strip().splitlines()[-1]
        loop.wait()
        found = checkpoint.load(root, model)
        # The last call to return may have been one that does not wait.
        assert found.step >= int(saved) - 1
        assert torch.equal(model.bias, torch.full((64,), float(found.step)))


def test_killed_at_any_moment(tmp_path: Path) -> None:
    kill_and_load(tmp_path, 1)


@pytest.mark.deep
def test_killed_at_many_moments(tmp_path: Path) -> None:
    kill_and_load(tmp_path, 60)
