"""What a model returns: several scalars, a loss by name, caches, and structures of every kind."""

from __future__ import annotations

import copy
import enum
import logging
import re
from collections import Counter, OrderedDict, UserDict, defaultdict, namedtuple
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from autopar.errors import AutoparError, CaptureError, InfeasibleError
from autopar.ir.signature.outputs import at
from autopar.parallelize import parallelize
from autopar.search.options import Search
from autopar.verify.verify import verify

x = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class Several(nn.Module):
    """Three scalars and what they are made of; one of them is a parameter's own."""

    def __init__(self, make: Any = None) -> None:
        super().__init__()
        self.f = nn.Linear(4, 4)
        self.logit_scale = nn.Parameter(torch.tensor(0.5))
        self.make = make

    def forward(self, x: torch.Tensor) -> Any:
        h = self.f(x)
        found = {
            "losses": {"fit": (h * self.logit_scale.exp()).square().mean(), "small": h.abs().sum()},
            "logit_scale": self.logit_scale.exp(),
            "h": h,
            "seen": h.detach().mean(),
            "n": h.shape[0],
        }
        return found if self.make is None else self.make(found)


def pair(model: nn.Module, **options: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    plain = model.double()
    return plain, parallelize(copy.deepcopy(plain), None, **options)


def compare(plain: nn.Module, model: nn.Module, loss: Any, *args: Any) -> None:
    for m in (plain, model):
        m.zero_grad()
    expected, found = (loss(m(*args)) for m in (plain, model))
    torch.testing.assert_close(found, expected)
    expected.backward()
    found.backward()
    for (name, p), q in zip(plain.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, msg=lambda text, name=name: f"{name}: {text}")


LOSSES = {
    "weighted": lambda out: out["losses"]["fit"] + 3 * out["losses"]["small"] * out["logit_scale"],
    "product": lambda out: out["losses"]["fit"] * out["losses"]["small"],
    "one": lambda out: out["losses"]["small"],
    "other": lambda out: out["logit_scale"].square(),
}


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_flow_through_all_scalars(name: str) -> None:
    plain, model = pair(Several())
    compare(plain, model, LOSSES[name], x)
    out = model(x)
    assert out["n"] == 6
    assert not out["seen"].requires_grad
    with pytest.raises(AutoparError, match=r"asked through output 'h'.*loss="):
        out["h"].sum().backward()


class ZeroGradients(nn.Module):
    """Parameters and inputs that scalars depend on through operators whose gradients are zero."""

    def __init__(self) -> None:
        super().__init__()
        self.v, self.w = (nn.Parameter(torch.full((4,), 1.5, dtype=torch.float64)) for _ in range(2))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (self.v * x).sum() + self.w.sign().sum(), self.w.floor().sum(), (self.v * y.ceil()).sum()


@pytest.mark.parametrize("index", range(3))
def test_gradients_are_zeros_or_none_as_in_eager_mode(index: int) -> None:
    """An optimizer applies weight decay to a parameter whose gradient is zero, and skips one that has none."""
    found = []
    for model in pair(ZeroGradients()):
        given = [torch.ones(4, dtype=torch.float64, requires_grad=True) for _ in range(2)]
        model(*given)[index].backward()
        found.append([t.grad if t.grad is None else t.grad.tolist() for t in (*given, *model.parameters())])
    assert found[0] == found[1]


def test_a_forward_that_leaves_out_the_models_at_times_is_refused() -> None:
    model, uses = parallelize(Several().double(), None), list[bool]()
    model.forward = lambda x, own=model.forward: own(x)["losses"]["fit"] if uses.pop() else model.f(x).sum()
    uses.append(True)
    model(x).backward()
    assert model.f.weight.grad is not None
    uses.append(False)
    with pytest.raises(AutoparError, match=r"forward of the parallelized model was replaced .*Replace it before"):
        model(x)


def test_gradients_of_all_outputs() -> None:
    plain, model = pair(Several(), loss="outside")
    compare(plain, model, lambda out: out["losses"]["fit"] * out["h"].square().sum() + out["logit_scale"], x)


@pytest.mark.some(1)
@pytest.mark.parametrize(
    "loss", ["losses.fit", lambda out: out["losses"]["fit"], lambda out: dict(out)["losses"].get("fit")]
)
def test_a_loss_that_is_named_carries_gradients_alone(loss: Any) -> None:
    plain, model = pair(Several(), loss=loss)
    compare(plain, model, lambda out: 2 * out["losses"]["fit"], x)
    out = model(x)
    assert list(out) == ["losses", "logit_scale", "h", "seen", "n"]
    for other in (out["losses"]["small"], out["logit_scale"], out["h"].sum()):
        with pytest.raises(AutoparError, match=r"only the loss carries gradients.*loss="):
            other.backward()
    model.eval()
    with torch.no_grad():
        torch.testing.assert_close(model(x)["losses"], plain(x)["losses"])


@dataclass
class Out:
    """An output."""

    loss: Any
    rest: Any = None


@pytest.mark.parametrize(
    ("loss", "make", "read"),
    [
        (0, lambda f: (f["losses"]["fit"], f["h"], f["losses"]["small"]), lambda out: out[0]),
        (-1, lambda f: (f["losses"]["fit"], f["h"], f["losses"]["small"]), lambda out: out[-1]),
        ("1.small", lambda f: (f["logit_scale"], f["losses"]), lambda out: out[1]["small"]),
        ("rest.fit", lambda f: Out(f["logit_scale"], f["losses"]), lambda out: out.rest["fit"]),
        ("loss", lambda f: Out(f["losses"]["fit"], f["logit_scale"]), lambda out: out.loss),
        ("a.b", lambda f: {"a.b": f["losses"]["fit"], "c": f["losses"]["small"]}, lambda out: out["a.b"]),
    ],
)
def test_the_loss_by_index_path_and_attribute(loss: Any, make: Any, read: Any) -> None:
    plain, model = pair(Several(make), loss=loss)
    compare(plain, model, read, x)


@pytest.mark.parametrize("which", ["parameter", "batch"])
def test_what_goes_in_comes_out(which: str) -> None:
    """A parameter is one of the scalars, and what is returned is of the batch."""

    class Returns(Several):
        def forward(self, x: torch.Tensor) -> Any:
            out = super().forward(x)
            return out | ({"given": self.logit_scale} if which == "parameter" else {"given": x, "view": x[:2]})

    plain, model = pair(Returns())
    compare(plain, model, lambda out: out["losses"]["fit"] * (2 + out["given"].sum()), x)
    same(dict(model(x))["given"].detach(), dict(plain(x))["given"].detach())


def test_one_tensor_twice_is_one_loss() -> None:
    plain, model = pair(Several(lambda f: (f["losses"]["fit"], {"loss": f["losses"]["fit"], "h": f["h"]})))
    compare(plain, model, lambda out: out[0] + 2 * out[1]["loss"], x)
    assert model._autopar.latest.program.loss == 0
    found = model(x)
    assert found[0] is found[1]["loss"]


@pytest.mark.parametrize(
    ("loss", "text"),
    [
        (
            "loss",
            r"loss='loss': the model's output has no such entry.*scalars that require a gradient are 'losses.fit'",
        ),
        ("h", r"loss='h' gives a tensor of shape \(6, 4\).*'losses.fit', 'losses.small', 'logit_scale'"),
        ("seen", r"loss='seen' gives a scalar that requires no gradient"),
        ("n", r"loss='n' gives a int"),
        (lambda out: out["h"].mean(), r"tensors that are no scalars of the output.*loss_fn="),
        (lambda out: out["none"], r"the function loss=: the model's output has no such entry \('none'\)"),
    ],
)
def test_a_wrong_loss_is_named(loss: Any, text: str) -> None:
    with pytest.raises(CaptureError, match=text):
        pair(Several(), loss=loss)[1](x)


def weighted(out: Any) -> torch.Tensor:
    fit: torch.Tensor = out["losses"]["fit"] + 0.5 * out["losses"]["small"]
    return fit


@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_loss_that_a_function_makes(microbatches: int) -> None:
    search = Search(pins={"microbatches": microbatches})
    plain, model = pair(Several(), loss=weighted, search=search)
    compare(plain, model, weighted, x)
    compare(plain, model, lambda out: -3 * out["losses"]["fit"] - 1.5 * out["losses"]["small"], x)
    assert model.plan.microbatches == microbatches
    out = model(x)
    same(out["logit_scale"].detach(), plain(x)["logit_scale"].detach())
    for other in (out["losses"]["small"], weighted(out) + out["logit_scale"]):
        with pytest.raises(AutoparError, match=r"only a multiple of that loss has a gradient.*leave loss= out"):
            other.backward()
    with pytest.raises(AutoparError, match="only the loss carries gradients"):
        out["h"].sum().backward()


def test_a_loss_that_a_function_multiplies() -> None:
    plain, model = pair(Several(), loss=lambda out: out["losses"]["fit"] * out["logit_scale"])
    compare(plain, model, lambda out: out["logit_scale"] * out["losses"]["fit"], x)
    report = verify(Several().double(), (x,), {"a": 2}, loss=weighted, plan="random")
    assert max(report.max_error, report.capture_error) < 1e-9


def test_loss_and_loss_fn() -> None:
    with pytest.raises(ValueError, match="loss= picks a scalar of the output and loss_fn= makes one"):
        parallelize(Several(), None, loss="a", loss_fn=lambda output, batch: output)


def test_microbatches_need_one_loss() -> None:
    search = Search(pins={"microbatches": 2})
    with pytest.raises(
        InfeasibleError,
        match=r"3 scalars that the model returns or keeps in attributes carry gradients.*loss=\"losses.total\"",
    ):
        pair(Several(), search=search)[1](x)
    plain, model = pair(Several(), search=search, loss="losses.fit")
    compare(plain, model, lambda out: out["losses"]["fit"], x)
    with pytest.raises(InfeasibleError, match="would need one loss, and 3 scalars carry gradients: name it, loss="):
        pair(Several(), memory=100)[1](x)
    assert model.plan.microbatches == 2
    torch.testing.assert_close(model(x)["losses"]["small"], plain(x)["losses"]["small"])


def test_emulated() -> None:
    for plan in (None, "random"):
        report = verify(Several().double(), (x,), {"a": 2}, plan=plan)
        assert report.max_error < 1e-9
        assert report.capture_error < 1e-9
        assert len(report.program.placeholders) - len(report.program.inputs) == 0
    report = verify(Several().double(), (x,), {"a": 2}, loss="losses.small", microbatches=2)
    assert report.max_error < 1e-9
    assert report.loss is not None


def test_paths() -> None:
    assert at({"a": [1, {"b": 2}]}, "a.1.b") == 2
    assert at((1, 2), -1) == 2
    assert at(Out(3), "loss") == 3
    assert at({"a.b": {"c.d": 4}}, "a.b.c.d") == 4


# Caches.


class Cache:
    """Of no framework, by its name."""


class HoldsCache(nn.Module):
    """Returns a cache in many places."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.f = nn.Linear(4, 4)
        self.make = make

    def forward(self, x: torch.Tensor) -> Any:
        h = self.f(x)
        return self.make(h.square().mean(), h)


def dynamic_cache(h: torch.Tensor) -> Any:
    from transformers.cache_utils import DynamicCache

    cache = DynamicCache()
    cache.update(h[None, None], h[None, None], 0)
    return cache


def with_field(loss: torch.Tensor, h: torch.Tensor) -> Any:
    from transformers.utils import ModelOutput

    @dataclass
    class Output(ModelOutput):
        loss: Any = None
        logits: Any = None
        cache: Any = None  # as transformers 5.24 calls it

    return Output(loss=loss, logits=h, cache=dynamic_cache(h))


CACHES = {
    "field": with_field,
    "tuple": lambda loss, h: (loss, h, dynamic_cache(h)),
    "nested": lambda loss, h: {"loss": loss, "inner": [{"mems": dynamic_cache(h)}, h]},
    "dataclass": lambda loss, h: Out(loss, (h, dynamic_cache(h))),
    "own": lambda loss, h: {"loss": loss, "state": Cache()},
    "old": lambda loss, h: {"loss": loss, "past_key_values": ((h, h), (h, h))},
}


@pytest.mark.parametrize("name", CACHES)
def test_caches_are_dropped_wherever_they_are(name: str, caplog: pytest.LogCaptureFixture) -> None:
    plain, model = pair(HoldsCache(CACHES[name]))
    with caplog.at_level(logging.INFO, "autopar"):
        found = model(x)
    assert "from the output of the parallelized model; set use_cache=False" in caplog.text
    expected = plain(x)

    def loss(out: Any) -> torch.Tensor:
        return out[0] if isinstance(out, tuple) else out["loss"] if isinstance(out, dict) else out.loss

    torch.testing.assert_close(loss(found), loss(expected))
    assert type(found).__name__ == type(expected).__name__
    if name == "tuple":
        assert found[2] is None
    if name == "field":
        assert list(found) == ["loss", "logits"]
        assert found.cache is None


def test_a_cache_that_is_passed() -> None:
    from transformers.cache_utils import DynamicCache

    model = parallelize(HoldsCache(lambda loss, h: loss), None)
    model._autopar.original.forward = lambda x, cache=None: model._autopar.original.f(x).sum()
    with pytest.raises(CaptureError, match=r"batch\['cache'\] is a DynamicCache"):
        model(x, cache=DynamicCache())


# Structures.


class Color(enum.Enum):
    """A constant."""

    RED = 1


Pair = namedtuple("Pair", "left right")


class Registered:
    """A class that torch's pytrees know."""

    def __init__(self, tensor: Any, name: str) -> None:
        self.tensor, self.name = tensor, name


torch.utils._pytree.register_pytree_node(
    Registered, lambda r: ([r.tensor], r.name), lambda children, name: Registered(*children, name)
)


class Attributes(dict[str, Any]):
    """The attributes are the items."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.__dict__ = self


class Rows(list[Any]):
    """A list with an attribute."""

    note = ""


@dataclass(frozen=True)
class Frozen:
    """A dataclass that computes a field, and has no default constructor."""

    value: Any
    double: Any = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "double", self.value * 2)


def rows(h: Any) -> Rows:
    made = Rows([h])
    made.note = "n"
    return made


def counted(h: Any) -> Any:
    found: Any = defaultdict(list)
    found["a"].append(h)
    return found


STRUCTURES: dict[str, Any] = {
    "defaultdict": counted,
    "ordered": lambda h: OrderedDict(z=h, a=None),
    "counter": lambda h: {"t": h, "c": Counter("aab")},
    "namedtuple": lambda h: Pair(h, {"deep": (h * 2,)}),
    "frozen": Frozen,
    "registered": lambda h: Registered(h, "name"),
    "attributes": lambda h: Attributes(a=h),
    "list": rows,
    "user": lambda h: UserDict(a=h),
    "namespace": lambda h: SimpleNamespace(a=h, b=[h * 2]),
    "sizes": lambda h: {"t": h, "s": torch.Size([2, 3]), "max": h.max(0)},
    "constants": lambda h: {
        "t": h, "e": Color.RED, "s": "text", "b": b"x", "z": 1j, "set": {1, "a"}, "f": frozenset({2}),
        "n": np.float32(2), "none": None, "dtype": torch.float16, "slice": slice(1, 2), "range": range(3), "bool": True,
        "path": Path("a"),
    },
}  # fmt: skip


class Structured(nn.Module):
    """Takes a structure and returns it, computed with."""

    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, given: Any, make: str) -> Any:
        h = self.f(x) + first(given)
        return STRUCTURES[make](h)


def first(value: Any) -> torch.Tensor:
    """The first tensor in a structure."""
    if isinstance(value, torch.Tensor):
        return value
    inner = vars(value) if hasattr(value, "__dict__") and not isinstance(value, list | dict) else value
    items = inner.values() if hasattr(inner, "values") else inner
    return next(first(v) for v in items if isinstance(v, torch.Tensor | list | tuple | dict | UserDict))


def same(a: Any, b: Any) -> None:
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        torch.testing.assert_close(a, b)
    elif isinstance(a, dict | UserDict):
        assert list(a) == list(b)
        assert getattr(a, "default_factory", None) is getattr(b, "default_factory", None)
        for k in a:
            same(a[k], b[k])
    elif isinstance(a, list | tuple) and type(a) is not torch.Size:
        assert len(a) == len(b)
        for v, w in zip(a, b, strict=True):
            same(v, w)
        assert getattr(a, "note", None) == getattr(b, "note", None)
    elif isinstance(a, Registered | Frozen | SimpleNamespace):
        for name in vars(a):
            same(getattr(a, name), getattr(b, name))
    else:
        assert a == b


@pytest.mark.some(5)
@pytest.mark.parametrize("name", STRUCTURES)
def test_structures_go_in_and_come_out(name: str) -> None:
    plain, model = pair(Structured())
    given = STRUCTURES[name](x)
    expected, found = (m(x, given, name) for m in (plain, model))
    same(found, expected)
    for m in (plain, model):
        first(m(x, given, name)).sum().backward()
    torch.testing.assert_close(model.f.weight.grad, plain.f.weight.grad)
    if name == "attributes":
        assert found.a is found["a"]
    if name == "defaultdict":
        assert found["new"] == []


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"a": [np.zeros(3)]}, r"batch\['given'\]\['a'\]\[0\] is a ndarray.*torch.from_numpy"),
        ({x: 1}, r"batch\['given'\] has a tensor as a key"),
        ({"a": {torch.ones(1)}}, r"batch\['given'\]\['a'\] is a set that holds tensors.*list or a dict"),
        ([x.to_sparse()], r"batch\['given'\]\[0\] is a sparse_coo tensor.*to_dense"),
        ([object()], r"batch\['given'\]\[0\] is a object.*pass one of those"),
        ([len], r"batch\['given'\]\[0\] is a builtin_function_or_method"),
    ],
)
def test_what_cannot_be_carried_is_named(value: Any, text: str) -> None:
    with pytest.raises(CaptureError, match=text):
        pair(Structured())[1](x, value, "ordered")


def test_what_contains_itself() -> None:
    value: list[Any] = [x]
    value.append(value)
    with pytest.raises(CaptureError, match=r"batch\['given'\]\[1\] contains itself"):
        pair(Structured())[1](x, value, "ordered")


def test_no_rows() -> None:
    class Empty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.f = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            h = self.f(x)
            return {"loss": h.square().sum(), "h": h, "none": h[:0]}

    plain, model = pair(Empty())
    for batch in (x[:0], x):
        compare(plain, model, lambda out: out["loss"], batch)
        found = model(batch)
        assert found["h"].shape == batch.shape
        assert found["none"].shape == (0, 4)
    assert verify(Empty().double(), (x[:0],), {"a": 2}).max_error < 1e-9


def test_a_batch_encoding() -> None:
    from transformers import BatchEncoding

    plain, model = pair(Structured())
    given = BatchEncoding({"a": x, "words": ["b"]})
    torch.testing.assert_close(model(x, given, "ordered")["z"], plain(x, given, "ordered")["z"])
    assert re.match("Batch", type(given).__name__)
