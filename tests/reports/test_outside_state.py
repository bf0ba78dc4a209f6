"""State that is in no module, wherever Python lets it be: a change is seen."""

from __future__ import annotations

import array
import contextvars
import functools
import importlib
import math
import os
import sys
import threading
import types
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import activations
from transformers.activations import NewGELUActivation

import autopar

X = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(4, 3)


class Scaled(nn.Module):
    """A linear layer times what a case says; each case is a subclass of its own, whose code is looked into."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, 2)

    def scale(self) -> Any:
        return 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).square().mean() * self.scale()


class Meta(type):
    scale = 1.0


class Configured(metaclass=Meta):
    pass


class Once:
    """A singleton."""

    one: Once | None = None

    def __init__(self) -> None:
        self.scale = 1.0

    @classmethod
    def get(cls) -> Once:
        cls.one = cls.one or cls()
        return cls.one


class Descriptor:
    value = 1.0

    def __get__(self, owner: Any, kind: Any) -> float:
        return self.value


class Holder:
    scale = 1.0


class Activation:
    """An object that is called, and counts."""

    def __init__(self) -> None:
        self.slope, self.calls = 1.0, 0

    def __call__(self, h: Tensor) -> Tensor:
        self.calls += 1
        return h * self.slope * self.calls


SETTING, LOCAL, HOLDER, BY_NAME = contextvars.ContextVar("SETTING", default=1.0), threading.local(), Holder(), 1.0
BYTES, NUMBERS, MODULE = bytearray(b"\x01"), array.array("d", [1.0]), types.ModuleType("a_users_module")
VIEW = memoryview(bytearray(b"\x01"))
LOCAL.scale = 1.0
vars(MODULE).update(scale=1.0)
sys.modules["a_users_module"] = MODULE


TENSOR = torch.ones(1, dtype=torch.float64)


def steady() -> float:
    return 1.0


def case(read: Callable[[Any], Any], change: Callable[[Any, int], Any], **members: Any) -> Any:
    """A class whose ``scale`` is ``read``, and what changes it before each call."""
    return pytest.param(type("Case", (Scaled,), {"scale": read, **members}), change)


class Plain:
    ratio = 1.0


class Derived(Plain):
    pass


def shadow(model: Any, i: int) -> None:
    """Give a class an attribute that its base has."""
    if i > 1:
        Derived.ratio = float(i)
    elif "ratio" in vars(Derived):
        del Derived.ratio


def from_import(model: Any) -> Any:
    from a_users_module import scale  # type: ignore[import-not-found]

    return scale


def plain_import(model: Any) -> Any:
    import a_users_module

    return a_users_module.scale


def called(model: Any) -> Any:
    return model.act(2.0)


def toggled() -> int:
    torch.use_deterministic_algorithms(not torch.are_deterministic_algorithms_enabled())
    return 1 + torch.are_deterministic_algorithms_enabled()


def with_local(model: Any, i: int) -> None:
    model.local, LOCAL.scale = LOCAL, float(i)


CASES = {
    "environment": case(lambda m: float(os.environ.get("AUTOPAR_TEST_SCALE", "1")),
                        lambda m, i: os.environ.update(AUTOPAR_TEST_SCALE=str(i))),
    "getenv": case(lambda m: float(os.getenv("AUTOPAR_TEST_SCALE", "1")),
                   lambda m, i: os.environ.update(AUTOPAR_TEST_SCALE=str(i))),
    "context variable": case(lambda m: SETTING.get(), lambda m, i: SETTING.set(float(i))),
    "thread-local": case(lambda m: LOCAL.scale, lambda m, i: setattr(LOCAL, "scale", float(i))),
    "weak reference": case(lambda m: m.ref().scale, lambda m, i: setattr(HOLDER, "scale", float(i)),
                           ref=weakref.ref(HOLDER)),
    "metaclass": case(lambda m: Configured.scale, lambda m, i: setattr(Meta, "scale", float(i))),
    "singleton": case(lambda m: Once.get().scale, lambda m, i: setattr(Once.get(), "scale", float(i))),
    "subclass": case(lambda m: m.held.ratio, shadow, held=Derived()),
    "descriptor": case(lambda m: m.value, lambda m, i: setattr(Descriptor, "value", float(i)), value=Descriptor()),
    "by a string": case(lambda m: getattr(Holder, "sca" + "le"), lambda m, i: setattr(Holder, "scale", float(i))),
    "globals()": case(lambda m: globals()["BY_NAME"], lambda m, i: globals().update(BY_NAME=float(i))),
    "bytes": case(lambda m: BYTES[0], lambda m, i: BYTES.__setitem__(0, i)),
    "numbers": case(lambda m: NUMBERS[0], lambda m, i: NUMBERS.__setitem__(0, float(i))),
    "view of memory": case(lambda m: VIEW[0], lambda m, i: VIEW.__setitem__(0, i)),
    "from import within": case(from_import, lambda m, i: setattr(MODULE, "scale", float(i))),
    "import within": case(plain_import, lambda m, i: setattr(MODULE, "scale", float(i))),
    "import by name": case(lambda m: importlib.import_module("a_users_module").scale,
                           lambda m, i: setattr(MODULE, "scale", float(i))),
    "sys.modules": case(lambda m: sys.modules["a_users_module"].scale, lambda m, i: setattr(MODULE, "scale", float(i))),
    "code in a text": case(lambda m: eval("MODULE.scale"), lambda m, i: setattr(MODULE, "scale", float(i))),
    "code of a function": case(lambda m: steady(),
                               lambda m, i: setattr(steady, "__code__", eval(f"lambda: {i}.0").__code__)),
    "item of a tensor": case(lambda m: TENSOR.item(), lambda m, i: TENSOR.fill_(i)),
    "array of a tensor": case(lambda m: float(np.asarray(TENSOR)[0]), lambda m, i: TENSOR.fill_(i)),
    "deterministic": case(lambda m: 1 + torch.are_deterministic_algorithms_enabled(),
                          lambda m, i: torch.use_deterministic_algorithms(i % 2 == 0)),
    "default dtype": case(lambda m: torch.tensor(1 / 3).double(),
                          lambda m, i: torch.set_default_dtype((torch.float32, torch.float64)[i % 2])),
    "a setting that a call changes": case(lambda m: toggled(),
                                          lambda m, i: i > 1 or torch.use_deterministic_algorithms(False)),
    "thread-local of an attribute": case(lambda m: m.local.scale, with_local),
    "kernels of attention": case(lambda m: 1 + torch.backends.cuda.flash_sdp_enabled(),
                                 lambda m, i: torch.backends.cuda.enable_flash_sdp(i % 2 == 0)),
}  # fmt: skip


def losses(model: Any, runs: Any, change: Callable[[Any, int], Any]) -> list[Any]:
    """Loss and gradient of three calls, each after a change."""
    found = []
    for i in (1, 2, 5):
        change(model, i)
        model.zero_grad()
        loss = runs(X)
        loss.backward()
        found.append((loss.item(), model.linear.weight.grad.clone()))
    return found


@pytest.fixture
def settings() -> Any:
    """Torch's settings, given back."""
    dtype, deterministic = torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()
    flash = torch.backends.cuda.flash_sdp_enabled()
    yield
    torch.set_default_dtype(dtype)
    torch.use_deterministic_algorithms(deterministic)
    torch.backends.cuda.enable_flash_sdp(flash)


def assert_equal(kind: Any, change: Callable[[Any, int], Any]) -> None:
    plain, given = kind().double(), kind().double()
    expected = losses(plain, plain, change)
    parallel: Any = autopar.parallelize(given, None)
    for (a, g), (b, h) in zip(expected, losses(parallel, parallel, change), strict=True):
        assert a == pytest.approx(b, rel=1e-12)
        assert torch.allclose(g, h, rtol=1e-12, atol=0)


@pytest.mark.some(4)
@pytest.mark.usefixtures("settings")
@pytest.mark.parametrize(("kind", "change"), CASES.values(), ids=CASES.keys())
def test_a_change_is_seen(kind: Any, change: Callable[[Any, int], Any]) -> None:
    assert_equal(kind, change)


class Called(Scaled):
    """An object that is called has attributes, as one whose methods are called."""

    def __init__(self) -> None:
        super().__init__()
        self.act = Activation()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.linear(x)).square().mean()


def test_objects_that_are_called() -> None:
    assert_equal(Called, lambda m, i: setattr(m.act, "slope", float(i)))


@pytest.mark.parametrize("kind", [nn.ReLU, NewGELUActivation])
def test_forward_of_a_librarys_module(kind: type[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    """As libraries of faster kernels replace it."""

    class Activates(Scaled):
        act = kind()

        def scale(self) -> Any:
            return self.act(torch.tensor(2.0))

    def replace(model: Any, i: int) -> None:
        monkeypatch.setattr(kind, "forward", lambda self, x: x * i)

    assert_equal(Activates, replace)


SLOPES = [1.0]


@torch.library.custom_op("autopar_reports::sloped", mutates_args=())
def sloped(x: Tensor) -> Tensor:
    return x.clone()


sloped.register_fake(torch.empty_like)
sloped.register_autograd(lambda ctx, gradient: gradient * SLOPES[0])


def test_the_derivative_of_a_custom_operator() -> None:
    """Which is traced, where the operator itself runs."""

    class Sloped(Scaled):
        def forward(self, x: Tensor) -> Tensor:
            return sloped(self.linear(x)).square().mean()

    assert_equal(Sloped, lambda m, i: SLOPES.__setitem__(0, float(i)))


REPLACED: dict[str, tuple[Any, str, Callable[[Any], Any]]] = {
    "torch.nn's": (functional, "silu", lambda m: m.silu(m.linear.weight.detach()).sum()),
    "of torch": (torch, "cosh", lambda m: torch.cosh(torch.tensor(2.0))),
    "of a part": (torch.linalg, "det", lambda m: torch.linalg.det(torch.ones(2, 2))),
    "of numpy": (np, "sqrt", lambda m: float(np.sqrt(2.0))),
    "of a package's": (activations, "math", lambda m: m.gelu(torch.tensor(2.0))),
}


@pytest.mark.some(2)
@pytest.mark.parametrize("name", REPLACED)
def test_functions_of_libraries(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script puts another in the place of one between calls."""
    module, attribute, scale = REPLACED[name]

    class Calls(Scaled):
        silu, gelu = nn.SiLU(), NewGELUActivation()

    Calls.scale = scale  # type: ignore[method-assign]

    def replace(model: Any, i: int) -> None:
        monkeypatch.undo()
        function: Any = lambda x, **_: torch.as_tensor(x).sum() * float(i)  # noqa: E731
        value = types.SimpleNamespace(pi=float(i + 1), sqrt=math.sqrt) if attribute == "math" else function
        if i > 1:  # the first call has the library's
            monkeypatch.setattr(module, attribute, value)

    assert_equal(Calls, replace)


def test_a_module_that_the_first_call_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its names are not there when the state is first looked at."""
    (tmp_path / "imported_late.py").write_text("scale = 3.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    class Late(Scaled):
        def scale(self) -> Any:
            from imported_late import scale  # type: ignore[import-not-found]

            return scale

    model = autopar.parallelize(Late().double(), None)
    plain = Late().double()
    sys.modules.pop("imported_late", None)
    assert model(X).item() == pytest.approx(plain(X).item(), rel=1e-12)
    importlib.import_module("imported_late").scale = 7.0  # type: ignore[attr-defined]
    assert model(X).item() == pytest.approx(plain(X).item(), rel=1e-12)


def test_a_context_variable_that_a_call_sets() -> None:
    class Sets(Scaled):
        def scale(self) -> Any:
            SETTING.set(SETTING.get() + 1)
            return SETTING.get()

    def fresh(model: Any, i: int) -> None:
        if i == 1:
            SETTING.set(0.0)

    assert_equal(Sets, fresh)


@pytest.mark.slow
def test_batch_norm_that_averages_over_all_batches() -> None:
    """Its statistics are those of eager after three calls, and after one in evaluation; until they are left alone."""
    plain, given = (nn.Sequential(nn.BatchNorm1d(3, momentum=None), nn.Linear(3, 2)).double() for _ in range(2))
    given.load_state_dict(plain.state_dict())
    parallel: Any = autopar.parallelize(given, None)
    for i, (training, tracked) in enumerate(((True, True), (True, True), (False, True), (True, True), (True, False))):
        for model in (plain, parallel):
            model.train(training)
            model[0].track_running_stats = tracked
            model.zero_grad()
            model(X * (i + 1) + i).square().mean().backward()
        for a, b in zip(plain.parameters(), parallel.parameters(), strict=True):
            assert torch.allclose(a.grad, b.grad, rtol=1e-10, atol=1e-14)
        for a, b in zip(plain.buffers(), parallel.buffers(), strict=True):
            assert torch.allclose(a, b, rtol=1e-12, atol=0)
    report = autopar.verify(plain, (X,), {"a": 2}, loss_fn=lambda y, _: y.square().mean(), plan="random")
    assert max(report.max_error, report.capture_error) < 1e-7


def test_arguments_of_distributions_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """As eager checks them, whether or not torch.compile, which turns that off, has been used before."""
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)

    class Draws(Scaled):
        def forward(self, x: Tensor) -> Tensor:
            return -torch.distributions.Normal(self.linear(x), x[:, :2].sum(-1, keepdim=True)).log_prob(x[:, 2:]).mean()

    parallel, plain = autopar.parallelize(Draws().double(), None), Draws().double()
    assert parallel(X.abs() + 0.1).item() == pytest.approx(plain(X.abs() + 0.1).item(), rel=1e-12)
    for model in (plain, parallel):
        with pytest.raises(ValueError, match=r"constraint"):
            model(-X.abs() - 0.1)


@pytest.mark.parametrize("persistent", [True, False])
def test_buffers_that_a_call_registers(persistent: bool) -> None:
    """They are buffers afterwards, as those of eager."""

    class Registers(Scaled):
        def forward(self, x: Tensor) -> Tensor:
            if not hasattr(self, "mean"):
                self.register_buffer("mean", x.mean(0), persistent=persistent)
            else:
                self.mean = 0.5 * self.mean + 0.5 * x.mean(0)
            return super().forward(x - self.mean)

    plain, parallel = Registers().double(), autopar.parallelize(Registers().double(), None)
    for i in range(3):
        assert parallel(X + i).item() == pytest.approx(plain(X + i).item(), rel=1e-12)
        for a, b in (
            (plain.state_dict(), parallel.state_dict()),
            (dict(plain.named_buffers()), dict(parallel.named_buffers())),
        ):
            assert list(a) == list(b)
            assert all(torch.equal(v, b[n]) for n, v in a.items())


def test_lazy_modules() -> None:
    with pytest.raises(ValueError, match=r"'0.weight' has no shape yet .*call the model once"):
        autopar.parallelize(nn.Sequential(nn.LazyLinear(3)), None)


def test_partial_functions() -> None:
    """`functools.partial` with another argument is another function."""

    class Partial(Scaled):
        def __init__(self) -> None:
            super().__init__()
            self.factor: Any = functools.partial(float.__mul__, 1.0)

        def scale(self) -> Any:
            return self.factor(3.0)

    assert_equal(Partial, lambda m, i: setattr(m, "factor", functools.partial(float.__mul__, float(i))))
