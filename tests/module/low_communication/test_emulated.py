"""Workers of one process against the reference of each recurrence, step by step."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from autopar.errors import RankError
from autopar.module.low_communication.compressed.emulate import EmulatedCompression
from autopar.module.low_communication.emulate import EmulatedWorkers
from autopar.module.low_communication.stale.emulate import EmulatedStale
from autopar.module.low_communication.tokens import weight_of
from tests.distributed.models import mlp, mlp_batch
from tests.module.low_communication.cases import CASES, OPTIMIZERS
from tests.module.low_communication.reference import largest_difference, run

STEPS, WORKERS = 13, 3


def batches(step: int, worker: int) -> dict[str, torch.Tensor]:
    return mlp_batch(WORKERS * step + worker, rows=4)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("case", [name for name, (given, _) in CASES.items() if "synchronous" not in given])
def test_equals_the_reference(case: str, optimizer: str) -> None:
    given, algorithm = CASES[case]
    expected = run(mlp(), OPTIMIZERS[optimizer], batches, WORKERS, STEPS, algorithm)
    models = [mlp() for _ in range(WORKERS)]
    inner = [OPTIMIZERS[optimizer](m) for m in models]
    emulated = EmulatedWorkers(models, **{"mix": 0.5 if given.get("delay") else 0.0} | given)
    apart = 0.0
    for step in range(STEPS):
        for worker, (model, own) in enumerate(zip(models, inner, strict=True)):
            model.zero_grad()
            model(**batches(step, worker))["loss"].backward()
            own.step()
        emulated.step()
        for worker, model in enumerate(models):
            now = {n: p.detach() for n, p in model.named_parameters()}
            assert largest_difference(now, expected[step][worker]) < 1e-12
        apart = max(apart, largest_difference(dict(models[0].named_parameters()), expected[step][1]))
    assert apart > 1e-3  # workers do train apart


def tokens(step: int, worker: int) -> int:
    return 1 + (3 * step + 5 * worker) % 7


@pytest.mark.parametrize("case", ["DiLoCo", "streaming, long delay"])
def test_workers_count_by_their_tokens(case: str) -> None:
    given, algorithm = CASES[case]
    expected = run(mlp(), OPTIMIZERS["AdamW"], batches, WORKERS, STEPS, algorithm, tokens=tokens)
    plain = run(mlp(), OPTIMIZERS["AdamW"], batches, WORKERS, STEPS, algorithm)
    models = [mlp() for _ in range(WORKERS)]
    inner = [OPTIMIZERS["AdamW"](m) for m in models]
    emulated = EmulatedWorkers(models, **given, weighted=True)
    for step in range(STEPS):
        for worker, (model, own) in enumerate(zip(models, inner, strict=True)):
            model.zero_grad()
            model(**batches(step, worker))["loss"].backward()
            own.step()
        emulated.step([tokens(step, worker) for worker in range(WORKERS)])
        for worker, model in enumerate(models):
            now = {n: p.detach() for n, p in model.named_parameters()}
            assert largest_difference(now, expected[step][worker]) < 1e-12
    assert largest_difference(now, plain[-1][-1]) > 1e-4
    with pytest.raises(RankError, match=r"worker 0 \(rank 0\) has counted no tokens since the last exchange"):
        for _ in range(8):
            emulated.step()
    with pytest.raises(RankError, match=r"ranks of worker 0 have counted 3 and 4 tokens, the latter on rank 1"):
        weight_of(0, [(0, 3), (0, 4), (1, 3), (1, 3)])
    assert weight_of(0, [(0, 0), (1, 0)], idle=True) == 1.0 and weight_of(0, [(0, 0), (1, 4)], idle=True) == 0.0


def test_quantized_exchanges_move_as_the_exact_ones_within_the_bound() -> None:
    """One exchange of a known difference: the anchor moves by its quantized mean."""
    for bits, largest in ((8, 127), (4, 7)):
        models = [mlp().float() for _ in range(2)]
        emulated = EmulatedWorkers(models, every=1, outer_lr=1.0, outer_momentum=0.0, bits=bits)
        before = copy.deepcopy(models[0])
        with torch.no_grad():
            for i, model in enumerate(models):
                for p in model.parameters():
                    p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(i)))
        means = [(a + b).detach() / 2 for a, b in zip(*(m.parameters() for m in models), strict=True)]
        emulated.step()
        assert all(torch.equal(a, b) for a, b in zip(*(m.parameters() for m in models), strict=True))
        far = 5.0 / (2 * largest)  # no normal number of these is above 5
        for p, mean, old in zip(models[0].parameters(), means, before.parameters(), strict=True):
            assert float((p.detach() - mean).abs().max()) <= far
            assert not torch.equal(p, old)


def test_what_few_bits_leave_out_is_fed_back() -> None:
    """A number that is small beside its block's largest never arrives without; with it, all of it but a rest."""
    far = {}
    for feedback in (False, True):
        models = [torch.nn.Linear(2, 1, bias=False) for _ in range(2)]
        for model in models:
            torch.nn.init.zeros_(model.weight)
        given = {"every": 1, "outer_lr": 1.0, "outer_momentum": 0.0, "bits": 4, "feedback": feedback}
        emulated = EmulatedWorkers(models, **given)
        for _ in range(60):
            with torch.no_grad():
                for model in models:
                    model.weight.add_(torch.tensor([[1.0, 0.03]]))
            emulated.step()
        far[feedback] = models[0].weight.tolist()[0]
    assert far[False] == [60.0, 0.0]
    assert far[True][0] == pytest.approx(60.0, abs=0.2) and far[True][1] == pytest.approx(1.8, abs=0.2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"every": 2, "feedback": True}, "feedback=True without bits"),
        ({"every": 0}, "every=0"),
        ({"every": True}, "every=True"),
        ({"every": 2, "fragments": 3}, "at most one is sent in a step"),
        ({"every": 4, "fragments": 3}, "the model has 2 blocks"),
        ({"every": 2, "delay": 2}, "before it is sent again"),
        ({"every": 2, "mix": 1.0}, "would never meet"),
        ({"every": 2, "outer_momentum": 1.0}, "below 1"),
        ({"every": 2, "outer_lr": 0.0}, "outer_lr=0.0"),
        ({"every": 2, "bits": 3}, "8 or 4"),
        ({"every": 2, "bits": 8}, "float64"),
        ({"every": 2, "synchronous": 1}, "average these yourself"),
    ],
)
def test_bad_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EmulatedWorkers([mlp(), mlp()], **settings)


def test_each_worker_has_a_model_and_its_optimizer() -> None:
    models = [mlp(), mlp()]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
    with pytest.raises(ValueError, match="models= is empty"):
        EmulatedWorkers([], every=1)
    for kind, settings in ((EmulatedCompression, {"method": "topk", "share": 0.5}), (EmulatedStale, {"staleness": 1})):
        with pytest.raises(ValueError, match="2 models and 1 optimizers"):
            kind(models, optimizers[:1], **settings)
        with pytest.raises(ValueError, match=r"optimizer 0 does not have 'up\.weight' of worker 0"):
            kind(models, optimizers[::-1], **settings)


def test_workers_begin_alike() -> None:
    other = mlp()
    torch.nn.init.zeros_(other.up.weight)  # type: ignore[union-attr,arg-type]
    with pytest.raises(ValueError, match="worker 1 does not begin"):
        EmulatedWorkers([mlp(), other], every=2)
