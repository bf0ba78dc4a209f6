"""Tensors in one another's memory, entries that are replaced, and what else a trace turns into something else."""

from __future__ import annotations

import copy
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from autopar import parallelize, verify
from autopar.errors import CaptureError

D = torch.float64


class Model(nn.Module):
    """Two linear layers, buffers of which one is a view, and a function of these."""

    def __init__(self, function: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.f, self.g = nn.Linear(4, 4, dtype=D), nn.Linear(4, 4, dtype=D)
        self.register_buffer("whole", torch.ones(6, 4, dtype=D))
        self.register_buffer("part", self.whole[:1])
        self.register_buffer("other", torch.ones(4, 4, dtype=D))
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        written = self.function(self, x)
        loss = self.g(self.f(x)).square().mean() + self.other.mean()
        return loss * written.mean() if isinstance(written, torch.Tensor) else loss


def x() -> torch.Tensor:
    return torch.randn(6, 4, dtype=D, generator=torch.Generator().manual_seed(1))


def sets(name: str, value: Callable[[Any, torch.Tensor], Any]) -> Callable[[Any, torch.Tensor], None]:
    def function(m: Any, x: torch.Tensor) -> None:
        path, _, attribute = name.rpartition(".")
        setattr(attrgetter(path)(m) if path else m, attribute, value(m, x))

    return function


def exchanges(m: Any, _: Any) -> None:
    m.f.weight.data, m.g.weight.data = m.g.weight.data, m.f.weight.data


def replaces(m: Any, _: Any) -> None:
    m.f, m.g = m.g, m.f


def puts_back(m: Any, _: Any) -> None:
    weight = m.f.weight
    del m.f.weight
    m.f.weight = weight


def calls(name: str, *arguments: Any) -> Callable[[Any, torch.Tensor], None]:
    def function(m: Any, x: torch.Tensor) -> None:
        attrgetter(name)(m)(*arguments)

    return function


KEPT = torch.zeros(4, dtype=D)


def shares_fresh_memory(m: Any, _: Any) -> None:
    m.f.weight.data = m.g.weight.data = m.g.weight.data * 2


REFUSED: dict[str, tuple[Callable[[Any, torch.Tensor], Any], str]] = {
    "data exchanged": (exchanges, "'f.weight' is set to memory of 'g.weight'"),
    "data of another": (sets("f.weight.data", lambda m, x: m.g.weight.data.t()), "set to memory of 'g.weight'"),
    "data transposed": (sets("f.weight.data", lambda m, x: m.f.weight.data.t()), "set to memory of 'f.weight'"),
    "data of two": (shares_fresh_memory, "both would share it"),
    "a global in place": (
        lambda m, x: KEPT.add_(1),
        r"writes in place to a tensor .*test_odd_memory.py:\d+ that is kept",
    ),
    "an item of a global": (lambda m, x: KEPT.__setitem__(0, 1.0), "writes in place to a tensor"),
    "data of the batch": (sets("whole.data", lambda m, x: x), "set to memory of the batch's tensor 0"),
    "a view in an attribute": (sets("kept", lambda m, x: m.f.weight.detach()), "to memory of parameter 'f.weight'"),
    "a view in a buffer": (sets("other", lambda m, x: m.f.weight.detach()), "to memory of parameter 'f.weight'"),
    "the whole of a view": (calls("whole.add_", 1), "'whole' and 'part' share their memory"),
    "submodules": (replaces, "replaces or deletes 'f'"),
    "parameter": (puts_back, "puts one in the place of another"),
    "buffer": (lambda m, x: delattr(m, "part"), "deletes buffer 'part'"),
    "frozen": (calls("f.weight.requires_grad_", False), "sets requires_grad of a parameter"),
    "resized": (calls("other.resize_", 7, 4), "resizes a tensor"),
    "backward pass": (lambda m, x: m.f(x).sum().backward(), r"it calls backward\(\)"),
    "numpy": (lambda m, x: m.f(x).detach().numpy(), "hands a tensor to numpy"),
    "formatted": (lambda m, x: f"{m.f(x).mean():.2f}", "makes a text of a tensor"),
    "sparse": (lambda m, x: torch.sparse.mm(torch.eye(6, dtype=D).to_sparse(), m.f(x)), "layout torch.sparse_coo"),
    "sparse rows": (lambda m, x: torch.eye(6, dtype=D).to_sparse_csr() @ m.f(x), "has a sparse tensor: only dense"),
    "oneDNN": (lambda m, x: m.f(x).float().to_mkldnn(), "of oneDNN's layout"),
    "nested": (lambda m, x: torch.nested.as_nested_tensor([m.f(x), x[:2]]), "makes a nested tensor.*pad the sequences"),
    "address": (lambda m, x: m.f(x) * m.f(x).data_ptr(), "data_ptr"),
    "of a list": (lambda m, x: torch.tensor([m.f(x).mean(), 1.0]), "use torch.stack"),
    "repeated": (lambda m, x: x.repeat_interleave((x[:, 0] > 0).long(), 0), "pass output_size="),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    function, text = REFUSED[name]
    with pytest.raises(CaptureError, match=text):
        parallelize(Model(function), None)(x())


def test_what_the_first_call_replaces_is_done_before() -> None:
    """As the error says."""

    def once(m: Any, _: Any) -> None:
        if not getattr(m, "done", False):
            m.f, m.done = m.g, True

    with pytest.raises(CaptureError, match=r"'f'.* call the model once before"):
        parallelize(Model(once), None)(x())
    model = Model(once)
    model(x())
    expected = model(x())
    assert torch.equal(parallelize(model, None)(x()), expected)


def test_a_view_in_a_list_of_what_is_written() -> None:
    model = Model(lambda m, x: m.other.mul_(m.views[0].sum()))
    model.views = [model.other[:1]]
    with pytest.raises(CaptureError, match=r"'other' and 'views\[0\]' share their memory"):
        parallelize(model, None)(x())
    model.views = [model.other]
    plain, parallel = copy.deepcopy(model), parallelize(model, None)
    for _ in range(2):
        plain(x()), parallel(x())
    assert torch.equal(plain.other, model.other)


def sets_to_another(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.whole.add_(1)
    y: torch.Tensor = m.f(x) * m.other.sum()
    m.other = m.whole if m.as_it_is else m.whole.detach()
    return y


@pytest.mark.parametrize("as_it_is", [True, False])
def test_a_buffer_that_gets_the_memory_of_another(as_it_is: bool) -> None:
    """The next call writes to the one, and reads it in the other."""
    model = Model(sets_to_another)
    del model.part
    model.other, model.as_it_is = torch.ones_like(model.whole), as_it_is
    with pytest.raises(CaptureError, match=r"sets 'other' to memory of 'whole', to which it writes in place"):
        parallelize(model, None)(x())


def sets_first(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.other = m.whole
    m.whole.add_(1)
    y: torch.Tensor = m.f(x) * m.other.sum()
    return y


def test_a_buffer_that_is_set_to_another_before_it_is_read() -> None:
    model = Model(sets_first)
    del model.part
    model.other = torch.ones_like(model.whole)
    assert verify(model, (x(),), {"a": 2}, plan="random").max_error < 1e-10


def test_sparse_buffers_are_refused() -> None:
    model = Model(lambda m, x: None)
    model.register_buffer("graph", torch.eye(4, dtype=D).to_sparse_csr())
    with pytest.raises(CaptureError, match=r"'graph' has layout torch.sparse_csr: only dense"):
        parallelize(model, None)(x())


def profiled(m: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.profiler.record_function("a name"):
        y: torch.Tensor = m.f(x)
    return y


def copied(m: Any, x: torch.Tensor) -> None:
    m.f.weight.data = m.f.weight.data
    m.f.weight.data = m.g.weight.data.clone()
    m.other = m.g.weight.detach().clone()


def from_a_vector(m: Any, x: torch.Tensor) -> None:
    vector_to_parameters(parameters_to_vector(m.g.parameters()).detach() * 0.5, m.f.parameters())


def registers(m: Any, x: torch.Tensor) -> torch.Tensor:
    if not hasattr(m, "table"):
        m.register_buffer("table", torch.arange(4.0, dtype=D), persistent=False)
        m.kept = m.table
    return m.f(x) * m.kept


doubled = torch.compile(lambda y: y * 2, backend="eager")

SAME: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "profiled": profiled,
    "copied": copied,
    "from a vector": from_a_vector,
    "a buffer under two names": registers,
    "compiled": lambda m, x: doubled(m.f(x)),
    "asks for a layout": lambda m, x: m.f(x) * (1 + (m.f.weight.layout is torch.strided)),
}


@pytest.mark.some(2)
@pytest.mark.parametrize("name", SAME)
def test_equal_to_eager(name: str) -> None:
    plain = Model(SAME[name])
    model = parallelize(Model(SAME[name]), None)
    for _ in range(2):
        for m in (model, plain):
            m.zero_grad()
            m(x()).backward()
        for (key, a), b in zip(model.state_dict().items(), plain.state_dict().values(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12, msg=key)
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-12, atol=1e-12)


def test_a_parameter_under_another_name() -> None:
    """It was taken for a constant: its gradient lacked what came through that name."""
    model = Model(lambda m, x: x @ m.named)
    vars(model)["named"] = model.f.weight
    names = list(model.state_dict())
    assert verify(model, (x(),), {"a": 2}, plan="random").max_error < 1e-12
    parallelize(model, None)(x()).backward()
    assert list(model.state_dict()) == names and model.named is model.f.weight


def test_the_detached_loss_requires_no_gradient() -> None:
    model: Any = nn.Linear(4, 4, dtype=D)
    model.forward = lambda x, old=model.forward: (lambda y: {"loss": y, "log": y.detach()})(old(x).square().mean())
    found = parallelize(model, None)(x())
    assert found["loss"].requires_grad and not found["log"].requires_grad
    assert found["loss"] == found["log"]


class Attends(nn.Module):
    """Asks whether two arguments are one."""

    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Linear(4, 4, dtype=D)

    def forward(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return self.f(query * key).square().mean() * (2 if query is key else 3)


def test_one_tensor_twice() -> None:
    """In any order of the calls."""
    plain = Attends()
    model = parallelize(Attends(), None)
    model.load_state_dict(plain.state_dict())
    for pair in ([x()] * 2, [x(), x()], [x().requires_grad_()] * 2):
        gradients = []
        for m in (model, plain):
            pair[0].grad = None
            m(*pair).backward()
            gradients.append(pair[0].grad)
        torch.testing.assert_close(model(*pair), plain(*pair), rtol=1e-12, atol=1e-12)
        if gradients[1] is not None:
            torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-12, atol=1e-12)
