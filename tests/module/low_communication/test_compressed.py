"""Workers of one process that exchange compressed gradients, against the reference of each method, step by step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from autopar.errors import AutoparError
from autopar.module.low_communication.compressed.collectives import in_lock_step
from autopar.module.low_communication.compressed.emulate import EmulatedCompression
from autopar.module.low_communication.compressed.low_rank import LowRank
from autopar.module.low_communication.compressed.settings import Compression
from autopar.module.low_communication.compressed.step import WorkerStep
from tests.distributed.models import mlp, mlp_batch
from tests.module.low_communication.compressed_cases import CASES, OPTIMIZERS
from tests.module.low_communication.compressed_reference import METHODS, run
from tests.module.low_communication.reference import largest_difference

STEPS, WORKERS = 13, 3


def batches(step: int, worker: int) -> dict[str, torch.Tensor]:
    return mlp_batch(WORKERS * step + worker, rows=4)


def emulated(given: dict[str, Any], optimizer: Any = None) -> tuple[list[nn.Module], EmulatedCompression]:
    models = [mlp() for _ in range(WORKERS)]
    own = [(optimizer or OPTIMIZERS[given["method"]])(m) for m in models]
    return models, EmulatedCompression(models, own, **given)


def backward(models: list[nn.Module], step: int) -> None:
    for worker, model in enumerate(models):
        model.zero_grad()
        model(**batches(step, worker))["loss"].backward()


def trained(given: dict[str, Any], optimizer: Any = None) -> list[dict[str, torch.Tensor]]:
    """Parameters after each step, which are the same bits on all workers."""
    models, workers = emulated(given, optimizer)
    found = []
    for step in range(STEPS):
        backward(models, step)
        workers.step()
        now = [{n: p.detach().clone() for n, p in m.named_parameters()} for m in models]
        assert all(torch.equal(own[n], now[0][n]) for own in now for n in own)
        assert all(p.grad is not None for m in models for p in m.parameters())
        found.append(now[0])
    return found


@pytest.mark.parametrize("case", CASES)
def test_equals_the_reference(case: str) -> None:
    given = CASES[case]
    expected = run(mlp(), OPTIMIZERS[given["method"]], batches, WORKERS, STEPS, given)
    plain = run(mlp(), OPTIMIZERS[given["method"]], batches, WORKERS, STEPS, given | {"start": STEPS, "freeze": STEPS})
    found = trained(given)
    for step, own in enumerate(found):
        assert largest_difference(own, expected[step]) < 1e-12
        first = given.get("freeze", given.get("start", 0))
        # Until then as plain averaging, which the reference leaves to torch's own optimizers; then not.
        assert (largest_difference(own, plain[step]) < 1e-12) == (step < first)


@pytest.mark.parametrize("given", [{"method": "topk", "share": 1.0}, {"method": "powersgd", "rank": 12}])
def test_nothing_left_out_is_plain_averaging(given: dict[str, Any]) -> None:
    """All numbers, or a rank that gradients of these few samples do not exceed: 3 workers with 4 rows each."""

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.wide = nn.Linear(64, 64).double()

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": (self.wide(x.repeat(1, 4) * torch.arange(1, 65)) - y.sum()).square().mean()}

    expected = run(
        Wide(), lambda m: torch.optim.SGD(m.parameters(), lr=1e-5), batches, WORKERS, 4, given | {"start": 4}
    )
    models: list[nn.Module] = [Wide() for _ in range(WORKERS)]
    workers = EmulatedCompression(models, [torch.optim.SGD(m.parameters(), lr=1e-5) for m in models], **given)
    for step in range(4):
        backward(models, step)
        workers.step()
        assert largest_difference(dict(models[0].named_parameters()), expected[step]) < 1e-12
        assert workers.workers[0].error < 1e-12 and "wide.weight" in workers.workers[0].method.errors


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("method", METHODS)
def test_tensors_of_all_sizes(method: str, dtype: torch.dtype) -> None:
    """Of fewer numbers than workers, of none, of several dims; 16 bits are exchanged, and errors kept, in float32."""
    options: dict[str, Any] = {"powersgd": {"rank": 1}, "topk": {"share": 0.2}, "onebit": {}}[method]
    shapes = {"one": (1,), "few": (3,), "some": (17,), "matrix": (9, 7), "kernel": (4, 3, 3, 3), "none": (0, 5)}
    settings = Compression(method, **options, freeze=1 if method == "onebit" else None)
    like = {n: torch.zeros(shape, dtype=dtype) for n, shape in shapes.items()}
    workers = [WorkerStep(like, settings, i, 4).method for i in range(4)]
    wanted = torch.float64 if dtype == torch.float64 else torch.float32
    reference = {n: METHODS[method](n, s, 4, **options) for n, s in shapes.items() if n != "none"}
    for turn in range(3):
        given = [
            {n: torch.randn(shapes[n], generator=seeded(turn, i), dtype=torch.float64).to(wanted) for n in reference}
            for i in range(4)
        ]
        found = in_lock_step([w.exchange(g) for w, g in zip(workers, given, strict=True)])
        for name, exact in reference.items():
            expected = torch.from_numpy(exact([g[name].double().numpy() for g in given]))
            for own in found:
                assert own[name].dtype == wanted and own[name].shape == shapes[name]
                assert torch.equal(own[name], found[0][name])
            assert float((found[0][name] - expected).abs().max()) < (1e-12 if dtype == torch.float64 else 1e-4)


def seeded(turn: int, worker: int) -> torch.Generator:
    return torch.Generator().manual_seed(10 * turn + worker)


def test_machines_whose_libraries_give_other_bases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Signs of columns are free, and of dependent columns all is: the first worker's basis is everybody's."""
    expected = trained(CASES["powersgd"])
    of_torch, calls = torch.linalg.qr, [0]

    def of_this_machine(matrix: torch.Tensor) -> Any:
        q, r = of_torch(matrix)
        calls[0] += 1
        worker = (calls[0] - 1) // 2 % WORKERS  # two matrices each
        return (q, r) if not worker else (q.flip(1) * (-1) ** worker, r)

    monkeypatch.setattr(torch.linalg, "qr", of_this_machine)
    found = trained(CASES["powersgd"])  # with the same bits on all workers
    assert calls[0] == 2 * WORKERS * STEPS
    assert max(largest_difference(a, b) for a, b in zip(found, expected, strict=True)) == 0


def test_a_matrix_without_a_gradient_goes_on() -> None:
    """Factors of zeros are no number, and the next gradient finds its own."""
    worker = LowRank({"w": torch.zeros(8, 8, dtype=torch.float64)}, 1, 0)
    thin = torch.outer(torch.arange(8.0), torch.ones(8)).double()
    for given in (torch.zeros(8, 8).double(), thin, thin):
        (found,) = in_lock_step([worker.exchange({"w": given})])
        assert found["w"].isfinite().all()
    assert float((found["w"] - thin).abs().max()) < 1e-12


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"method": "signs"}, "one of 'powersgd', 'topk', 'onebit'"),
        ({"method": "powersgd"}, "must have rank="),
        ({"method": "powersgd", "rank": 0}, "rank=0"),
        ({"method": "powersgd", "rank": 99}, "rank=99: factors of so many columns are smaller than no matrix"),
        ({"method": "topk", "share": 0.1, "seed": 1}, "seed=1 is for method='powersgd'"),
        ({"method": "powersgd", "rank": 2, "share": 0.1}, "share=0.1 is for method='topk'"),
        ({"method": "topk", "share": 0.0}, "share=0.0: expected a number above 0, of at most 1"),
        ({"method": "topk", "share": 1.5}, "share=1.5"),
        ({"method": "onebit", "freeze": 0}, "freeze=0"),
        ({"method": "onebit", "freeze": 3, "start": 2}, "give that alone"),
    ],
)
def test_bad_settings(given: dict[str, Any], message: str) -> None:
    models = [mlp() for _ in range(2)]
    with pytest.raises(ValueError, match=message):
        EmulatedCompression(models, [torch.optim.Adam(m.parameters()) for m in models], **given)


def test_what_cannot_be_compressed() -> None:
    models, workers = emulated(CASES["topk"])
    backward(models, 0)
    models[1].up.weight.grad[0, 0] = float("inf")  # type: ignore[union-attr,index]
    with pytest.raises(AutoparError, match=r"gradient of 'up\.weight' on rank 1 is not finite in step 1"):
        workers.step()
    with pytest.raises(AutoparError, match="is float16"):
        EmulatedCompression([m.half() for m in models], [OPTIMIZERS["topk"](m) for m in models], **CASES["topk"])
    with pytest.raises(ValueError, match="there is one worker"):
        EmulatedCompression([mlp()], [], **CASES["topk"])
    with pytest.raises(ValueError, match=r"optimizer= is SGD"):
        emulated(CASES["onebit"], OPTIMIZERS["powersgd"])
    late, frozen = emulated({"method": "onebit", "freeze": 1})
    for model in late:
        model.down.requires_grad_(False)  # type: ignore[union-attr,operator]
    backward(late, 0)
    frozen.step()
    for model in late:
        model.down.requires_grad_(True)  # type: ignore[union-attr,operator]
    backward(late, 1)
    with pytest.raises(AutoparError, match=r"'down\.weight' had no gradient in the first steps"):
        frozen.step()
