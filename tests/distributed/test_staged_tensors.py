"""What torch computes with parameters and gradients of stages is what it computes with those of one device."""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autopar._torch_compat import TorchDispatchMode
from autopar.errors import AutoparError
from tests.distributed.launch import WAIT, Ranks, mesh_of

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(torch.__version__.startswith("2.11."), reason="torch 2.11: pipeline stages are an error"),
]

READ: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "full": lambda p: p,
    "mean": torch.mean,
    "mean of rows": lambda p: p.mean(0),
    "mean of columns": lambda p: p.mean(-1),
    "sum": torch.sum,
    "sum of rows": lambda p: p.sum(0),
    "sum of columns": lambda p: p.sum(-1),
    "var": torch.var,
    "std of rows": lambda p: p.std(0),
    "max": torch.max,
    "amin": lambda p: p.amin(0),
    "argmax": lambda p: p.argmax(0),
    "norm": torch.linalg.vector_norm,
    "norm of 1": lambda p: torch.linalg.vector_norm(p, 1),
    "norm of inf": lambda p: torch.linalg.vector_norm(p, float("inf")),
    "norm of -inf": lambda p: torch.linalg.vector_norm(p, float("-inf")),
    "norm of columns": lambda p: p.norm(dim=-1),
    "elements": lambda p: (p * 2 + 1).abs().sqrt().mean(),
    "two": lambda p: (p * p.exp()).sum(),
    "softmax": lambda p: p.softmax(0),
    "sort": lambda p: p.sort(0).values,
    "cat": lambda p: torch.cat([p, p]),
    "stack": lambda p: torch.stack([p, p]).amax(),
    "product": lambda p: torch.mm(p, p.new_ones((p.shape[-1], 2))) if p.ndim == 2 else p,
    "any": lambda p: (p > 0.1).any(),
    "like": lambda p: torch.zeros_like(p).add_(1).sum(),
}


def model_of() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    from tests.pipeline.test_pipelines import example

    model, batch = example("unet")
    return model.double(), {k: v.double() for k, v in batch.items()}


_PAIRS: dict[tuple[int, ...], tuple[Any, nn.Module, dict[str, torch.Tensor]]] = {}
"""Of this rank: to plan one takes longer than what is done with it."""


def pair(sizes: tuple[int, ...]) -> tuple[Any, nn.Module, dict[str, torch.Tensor]]:
    """The model in stages and as it is, with gradients."""
    from autopar.parallelize import parallelize
    from autopar.search.options import Search

    if sizes not in _PAIRS:
        (model, batch), (plain, _) = model_of(), model_of()
        pins = {"stages": sizes[0], "microbatches": 4}
        search = Search(pins=pins, recipe="random", seed=5)
        _PAIRS[sizes] = parallelize(model, mesh_of(*sizes), batch, search=search, timeout=WAIT), plain, batch
    parallel, plain, batch = _PAIRS[sizes]
    state = model_of()[0].state_dict()  # whatever was written since then
    parallel.load_full_state_dict(state), plain.load_state_dict(state)
    for each in (parallel, plain):
        each.zero_grad()
        each(**batch)["loss"].backward()
    return parallel, plain, batch


def whole(value: Any) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def read(rank: int, sizes: tuple[int, ...], every: bool) -> list[str]:
    """What is not as on one device, of all parameters and gradients or of one a stage and number of dims."""
    parallel, plain, _ = pair(sizes)
    there = {n: (p, q) for (n, p), q in zip(parallel.named_parameters(), plain.parameters(), strict=True)}
    wrong, owners, kinds = [], set(), set()
    for name, (p, q) in there.items():
        owners.add(owner := getattr(p, "owner_stage", None))
        if (owner, q.ndim) in kinds and not every:
            continue
        kinds.add((owner, q.ndim))
        for kind, mine, theirs in (("value", p, q), ("gradient", p.grad, q.grad)):
            for what, function in READ.items():
                found, expected = whole(function(mine)).detach(), function(theirs).detach()
                if found.shape != expected.shape or not torch.allclose(found, expected, rtol=1e-12, atol=1e-14):
                    wrong.append(f"{what} of {name}, {kind}: {found} for {expected}"[:200])
    assert len(owners - {None}) == sizes[0]
    return wrong


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "every"), [((2, 2), False), *(pytest.param(s, True, marks=pytest.mark.deep) for s in ((4,), (2, 2)))]
)
def test_what_is_read(ranks: Ranks, sizes: tuple[int, ...], every: bool) -> None:
    for wrong in ranks.run(read, sizes, every):
        assert not wrong


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=1e-2, foreach=True),
    "adamw fused": lambda ps: torch.optim.AdamW(ps, lr=1e-2, fused=True),
    "sgd fused": lambda ps: torch.optim.SGD(ps, lr=1e-2, momentum=0.9, nesterov=True, fused=True),
    "sgd": lambda ps: torch.optim.SGD(ps, lr=1e-2, momentum=0.9, nesterov=True),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, lr=1e-2),
}


def steps(rank: int, name: str) -> float:
    """How far two steps, with clipping and a penalty of the parameters' mean, are from one device's."""
    parallel, plain, batch = pair((2, 2))
    optimizers = [OPTIMIZERS[name](m.parameters()) for m in (parallel, plain)]
    worst = 0.0
    for norm in (float("inf"), 2.0):
        norms = []
        for model, optimizer in zip((parallel, plain), optimizers, strict=True):
            optimizer.zero_grad()
            model(**batch)["loss"].backward()
            penalty = sum((whole(p.mean()) ** 2 + whole((p * p).sum()) for p in model.parameters()), torch.zeros(()))
            penalty.backward()
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05, norm_type=norm))
        gradients = parallel.full_gradients()
        pairs = [(whole(norms[0]), norms[1]), *((gradients[n], p.grad) for n, p in plain.named_parameters())]
        for optimizer in optimizers:
            optimizer.step()
        state = parallel.full_state_dict()
        pairs += [(state[n], p) for n, p in plain.named_parameters()]
        worst = max(worst, *(float((a - b).detach().abs().max()) for a, b in pairs))
    return worst


@pytest.mark.deep
@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n == "adamw" else pytest.mark.deep) for n in OPTIMIZERS])
def test_optimizers_clipping_and_penalties(ranks: Ranks, name: str) -> None:
    assert max(ranks.run(steps, name)) < 1e-10


WAYS: dict[str, dict[str, bool]] = {"loop": {"foreach": False}, "lists": {"foreach": True}, "fused": {"fused": True}}


def by_lists(rank: int, sizes: tuple[int, ...]) -> tuple[dict[str, list[torch.Tensor]], dict[str, set[str]], bool]:
    """This rank's parameters after two scaled and clipped steps, and the operators of each way; and what is skipped."""
    parallel, _, _ = pair(sizes)
    parameters = [*parallel.parameters()]
    before = [(p.to_local().detach().clone(), p.grad.to_local().clone()) for p in parameters]
    after, operators, skipped = {}, {}, True
    for way, options in WAYS.items():
        optimizer = torch.optim.AdamW(parameters, lr=1e-2, **options)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        # The last step has an overflow, on one rank of one stage.
        for step in range(3):
            for p, (value, gradient) in zip(parameters, before, strict=True):
                if step == 0:
                    p._local_tensor.copy_(value)
                p.grad._local_tensor.copy_(gradient * 4)
            if step == 2 and rank == 1:
                next(g for g in (p.grad._local_tensor for p in parameters) if g.numel()).view(-1)[0] = float("inf")
            scaler.scale(torch.ones(()))
            with operators_called() as called:
                scaler.unscale_(optimizer)
                if step < 2:
                    torch.nn.utils.clip_grad_norm_(parameters, 0.05, foreach=options.get("foreach"))
                scaler.step(optimizer)
            operators[way] = operators.get(way, set()) | called
            scaler.update()
            if step == 1:
                after[way] = [p._local_tensor.clone() for p in parameters]
        skipped &= all(torch.equal(p._local_tensor, q) for p, q in zip(parameters, after[way], strict=True))
        skipped &= scaler.get_scale() == 2
    return after, operators, skipped


@contextlib.contextmanager
def operators_called() -> Iterator[set[str]]:
    found: set[str] = set()

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found.add(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    with Mode():
        yield found


@pytest.mark.parametrize("sizes", [pytest.param((4,), marks=pytest.mark.deep), (2, 2)])
def test_lists_and_fused_steps_are_the_loop(ranks: Ranks, sizes: tuple[int, ...]) -> None:
    for after, operators, skipped in ranks.run(by_lists, sizes):
        assert all(map(torch.equal, after["lists"], after["loop"]))
        torch.testing.assert_close(after["fused"], after["loop"], rtol=1e-12, atol=1e-14)
        assert {"_foreach_lerp_", "_foreach_norm", "_foreach_mul_"} <= operators["lists"]
        assert not {"_foreach_lerp_", "_foreach_norm"} & operators["loop"]
        assert {"_fused_adamw_", "_foreach_norm"} <= operators["fused"]
        assert skipped


def kept(rank: int) -> tuple[list[str], list[bool]]:
    """What is said of what cannot be; and whether copies are what was copied."""
    parallel, plain, _ = pair((4,))
    name = next(n for n, p in parallel.named_parameters() if hasattr(p, "owner_stage"))
    p, before = parallel.get_parameter(name), dict(plain.named_parameters())[name].detach()
    said = []
    for wrong in (pickle.dumps, lambda t: t.unsqueeze_(0)):
        with torch.no_grad(), pytest.raises((AutoparError, RuntimeError)) as error:
            wrong(p)
        said.append(str(error.value))
    optimizer = torch.optim.AdamW(parallel.parameters())
    optimizer.step()
    mine = optimizer.state[p]["exp_avg"]
    same = [torch.equal(copy.deepcopy(mine).full_tensor(), mine.full_tensor())]
    with torch.no_grad():
        same.append(abs(p.norm().item() - p.full_tensor().norm().item()) < 1e-9)
        torch.manual_seed(5)
        drawn = [torch.randn_like(p).full_tensor(), nn.init.normal_(p).full_tensor()]
        torch.manual_seed(5)
        same += [torch.equal(d, torch.randn_like(before)) for d in drawn]
        p.copy_(p * 0 + 2)
    return said, [*same, bool((p.full_tensor() == 2).all())]


def test_copies_and_what_cannot_be(ranks: Ranks) -> None:
    for (pickled, longer), same in ranks.run(kept):
        assert "autopar.checkpoint.torch_save" in pickled
        assert "would change the shape of a tensor on the mesh" in longer
        assert all(same)


def writes(model: Any) -> None:
    """Views, masks, plain tensors and means of rows, in place; values of one stage for another's."""
    parameters = [*model.parameters()]
    for i, p in enumerate(parameters):
        p.grad[p.grad.abs() < 0.01] = 0
        p.grad[:1] *= 3
        p.grad.view(-1)[1:3].add_(1)
        p.grad.add_(torch.linspace(0, 1, p.numel(), dtype=p.dtype).view(p.shape))
        with torch.no_grad():
            p.div_(1 + p.norm(dim=-1, keepdim=True))
            p[0].fill_(0.01 * i)
    for i, p in enumerate(parameters):
        for other in [q for q in parameters[i + 1 :] if q.shape == p.shape][-1:]:
            other.data = p.data.clone()
    vector = torch.nn.utils.parameters_to_vector(parameters)
    torch.nn.utils.vector_to_parameters(0.5 * vector, parameters)


WHOLE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "LBFGS": lambda ps: torch.optim.LBFGS(ps, lr=0.5, max_iter=2),
    "Adafactor": lambda ps: torch.optim.Adafactor(ps, lr=1e-2),
    "Rprop": lambda ps: torch.optim.Rprop(ps, lr=1e-2),
}


def written(rank: int) -> dict[str, float]:
    """How far parameters and gradients are from one device's, after writes and after steps of whole parameters."""
    parallel, plain, batch = pair((2, 2))
    apart = {}
    for name in ("writes", *WHOLE):
        for model in (parallel, plain):
            if name == "writes":
                writes(model)
                continue
            optimizer = WHOLE[name](model.parameters())

            def closure(model: Any = model, optimizer: Any = optimizer) -> torch.Tensor:
                optimizer.zero_grad()
                loss: torch.Tensor = model(**batch)["loss"]
                loss.backward()
                return loss

            for _ in range(2):
                optimizer.step(closure)
        values, gradients = parallel.full_state_dict(), parallel.full_gradients()
        of_plain = dict(plain.named_parameters())
        apart[name] = max(
            float((a - b).detach().abs().max())
            for n, p in of_plain.items()
            for a, b in ((values[n], p), (gradients[n], p.grad))
        )
    for p in parallel.share_memory().parameters():
        assert p.to_local().is_shared()
    parallel(**batch)["loss"].backward()
    return apart


@pytest.mark.slow
def test_what_is_written_goes_to_the_owner(ranks: Ranks) -> None:
    for apart in ranks.run(written):
        assert max(apart.values()) < 1e-9, apart
