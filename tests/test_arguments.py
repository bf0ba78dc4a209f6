"""Every argument of every public function: what it may not be is an error that names it, its value and a remedy."""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import autopar
from autopar import Cluster, Lowering, Plan, Precision, Rule, Search, Spec, checkpoint, cli, compiler, rule
from autopar.costs.arguments import AXES, SIZE, number, require, shown, whole
from autopar.costs.cluster import Between, Device, DeviceGroup, Link
from autopar.costs.memory import parse_bytes
from autopar.integrations.metrics import watch
from autopar.module.low_communication.compressed.settings import Compression
from autopar.module.low_communication.settings import Settings
from autopar.module.low_communication.stale.settings import Staleness
from autopar.parallelize import parallelize

NAN, INF = float("nan"), float("inf")


class Awkward:
    """Nothing that anybody expects; its text is an error."""

    def __repr__(self) -> str:
        raise RuntimeError("no text")


NOT_TEXT: list[Any] = [0, 1.5, True, b"x", ["x"], {"x": 1}, Awkward(), ""]
NO_FLAG: list[Any] = [0, 1, "yes", "False", [], NAN, Awkward(), torch.tensor(True)]
NO_FUNCTION: list[Any] = [0, "f", [], {}, NAN]
NO_PATH: list[Any] = [0, 1.5, True, b"x", ["x"], Awkward(), "", "a\0b", torch.zeros(1)]
NO_SIZE: list[Any] = [
    NAN, INF, -INF, -1, 0, "", "x", "-1GiB", "1e400GiB", "1e999999999", "0GiB", "70 gigs", "1 2", "٣GiB", True, [], {},
    "nan", "inf", 2**80, b"1GiB", Awkward(),
]  # fmt: skip
NO_AXES: list[Any] = [
    {"a": 0}, {"a": -1}, {"a": 2.0}, {"a": True}, {"a": "2"}, {"a": NAN}, {"a": None}, {"": 2}, {"\n": 2}, {1: 2},
    {"a": 2**40}, {"a": 2**20, "b": 2**20}, [("a", 2)], "a=2", 2, True, Awkward(), {"x" * 300: 2},
]  # fmt: skip
NO_WHOLE: list[Any] = [-1, 1.0, 1.5, NAN, INF, True, False, "1", [], 2**70, Awkward()]
NO_NUMBER: list[Any] = [-1, -0.1, NAN, -INF, True, "5", [], 1j, Awkward()]
NO_MODEL: list[Any] = [None, nn.Linear, lambda x: x, "model", 1, [nn.Linear(2, 2)], Awkward()]
NO_BATCH: list[Any] = [torch.zeros(2), 1, "x", {1, 2}, iter(()), np.zeros(2), Awkward()]
NO_DICT: list[Any] = [0, "x", ["a"], {1: "x"}, {"": "x"}, True, Awkward()]

MODEL, BATCH = nn.Linear(4, 4), (torch.zeros(2, 4),)
OF_PLAN: dict[str, list[Any]] = {
    "model": NO_MODEL, "batch": [*NO_BATCH, None], "axes": NO_AXES, "memory": NO_SIZE, "search": ["fast", 1, {}, Search],
    "optimizer": ["lion", "", None, 1, ["adamw"], torch.optim.SGD], "loss_fn": NO_FUNCTION, "progress": NO_FUNCTION,
    "compile": [None, *NO_FLAG],
    "loss": [1.5, True, "", b"x", [], NAN], "precision": ["int8", "", 1, [], {}, torch.int32, NAN, True],
    "cluster": ["", "h10", 1, None, [], "a\0b", "x" * 5000, Path("/nowhere/x.toml"), Awkward()],
}  # fmt: skip
OF_PARALLELIZE: dict[str, list[Any]] = {
    name: values for name, values in OF_PLAN.items() if name not in ("axes", "progress", "batch", "cluster")
} | {
    "batch": NO_BATCH, "mesh": ["cpu", 2, {"a": 2}, (2, 2), Awkward()], "inputs": ["locals", "", 1, None, True, []],
    "outputs": ["full", "", 1, None, True, []],
    "deterministic": [None, *NO_FLAG], "check": [None, *NO_FLAG], "cluster": ["", "h10", 1, [], "a\0b", Awkward()],
    "plan": [1, [], {}, True, Awkward()], "timeout": [0, None, INF, *NO_NUMBER], "init": [1, [], {}, "", True, "a\0b"],
    "compile": ["fast", 1, [], {}, NAN],
    "lengths": [[], 512, "512", [0], [1.5], [True], [-1], ["8"], {}, {"x": [8]}, {("x", 1): [8]}, {("batch.0", -1): [8]},
                {("batch.0", 1): []}, {("batch.0", 1): 8}, {("batch.0", 1): [8], ("batch.1", 1): [8]}, {8}, NAN, Awkward()],
}  # fmt: skip
OF_VERIFY: dict[str, list[Any]] = {
    "model": NO_MODEL, "batch": [*NO_BATCH, None], "axes": [None, *NO_AXES], "loss_fn": NO_FUNCTION,
    "loss": [1.5, True, ""], "plan": ["best", 1, [], True, Awkward()], "seed": NO_WHOLE,
    "microbatches": [0, *NO_WHOLE], "pins": NO_DICT, "dtype": [torch.int32, "float64", None, 1],
    "precision": ["int8", 1], "random_strides": [None, *NO_FLAG],
}  # fmt: skip
OF_SEARCH: dict[str, list[Any]] = {
    "time_limit": NO_NUMBER, "gap": [INF, *NO_NUMBER], "pins": [None, *NO_DICT], "roles": [None, {"a": "x"}, *NO_DICT],
    "recipe": ["fastest", *NOT_TEXT], "seed": NO_WHOLE, "tie_layers": [None, *NO_FLAG], "padding": [None, *NO_FLAG],
    "check": [None, *NO_FLAG], "cache": [None, *NO_FLAG],
    "imbalance": [None, 0.5, math.inf, True, "1.3", [1], [1, -1], [0, 0], [1, "x"], (Awkward(), 1), {0: 1}],
    "inexact": [None, 1, "local", ["x"], (1,), (Awkward(),), {"local": 1}],
    "quantized": [None, {"a": 8}, {"a": {}}, {"a": {"weights": 7}}, {"a": {"bits": 8}}, {"a": Awkward()}, *NO_DICT],
}  # fmt: skip
OF_SETTINGS: dict[str, list[Any]] = {
    "every": [0, None, "auto", *NO_WHOLE], "outer_lr": [0, INF, *NO_NUMBER], "outer_momentum": [1, 2, INF, *NO_NUMBER],
    "nesterov": [None, *NO_FLAG], "fragments": [0, 9, *NO_WHOLE], "delay": [8, *NO_WHOLE], "mix": [1, INF, *NO_NUMBER],
    "bits": [0, 2, 16, 8.0, "8", True, [], Awkward()], "synchronous": NO_WHOLE,
    "weighted": [None, *NO_FLAG], "feedback": [True, None, *NO_FLAG],
}  # fmt: skip
OF_COMPRESSION: dict[str, list[Any]] = {
    "method": ["signs", "", None, 1, [], Awkward()], "rank": [0, *NO_WHOLE], "share": [0, 1.5, INF, *NO_NUMBER],
    "freeze": [0, 3, *NO_WHOLE], "start": [None, *NO_WHOLE], "seed": [None, *NO_WHOLE],
    "doubling": [0, 3, *NO_WHOLE], "local": [0, 3, *NO_WHOLE], "longest": [0, 3, *NO_WHOLE],
}  # fmt: skip
OF_STALENESS: dict[str, list[Any]] = {
    "staleness": [None, *NO_WHOLE], "compensation": [None, INF, *NO_NUMBER], "owners": [0, *NO_WHOLE],
}  # fmt: skip
OF_PINS: dict[str, list[Any]] = {
    "recompute": ["all", 1, None, []], "offload": ["all", 1, True], "overlap": ["all", 1, None],
    "microbatches": [0, -1, 1.5, True, "2", NAN, [], None], "stages": [0, -1, 1.5, True, "2", [], [1], [""], None],
    "secondary": [0, True, None, "", [], {}, [1], [""]],
    "shares": [1, "search", None, {}, {"a": []}, {"a": [1]}, {"a": [2, 1]}, {"a": [0, 2]}, {"a": "x"}, {"a": [1.5, 0.5]},
               {"a": 1}, {"a": [1, 1], "b": [1, 1]}, {1: [1, 1]}],
    "w": [5, "Z(0)", "S", "S(x)", "P(sum)", {"a": 5}, ("S(0)", "Q"), NAN],
}  # fmt: skip
OF_STAGES: dict[str, list[Any]] = {
    "virtual": [0, -1, 1.5, True, "2", None], "stage_axis": NOT_TEXT, "schedule": ["1f2b", 7, [], [7], [["0F0", 7]], None],
    "stage_order": [1, "10", [], [0, 0], [1, 2], [True, 0], [0.0, 1], None],
}  # fmt: skip
OF_DEVICE: dict[str, list[Any]] = {
    "name": [1, "", "a\nb", None, "x" * 300], "flops": [{}, {"float32": 0}, {"float32": NAN}, {"int8": 1.0}, 1, None],
    "memory": [0, INF, *NO_NUMBER], "bandwidth": [0, INF, *NO_NUMBER], "launch": [0, INF, *NO_NUMBER],
    "efficiency": [0, 1.5, INF, *NO_NUMBER], "units": [0, *NO_WHOLE], "ramp": [INF, *NO_NUMBER], "kind": ["tpu", 1, None],
    "alone": [0.9, INF, *NO_NUMBER],
}  # fmt: skip
OF_LINK: dict[str, list[Any]] = {
    "name": [1, "", "a\nb", None], "bandwidth": [0, INF, *NO_NUMBER], "latency": [0, INF, *NO_NUMBER],
    "algorithms": ["ring", (), ("bruck",), 1, None, (1,)], "copies": [INF, *NO_NUMBER], "contention": [INF, *NO_NUMBER],
    "wait": [-1.0, INF, *NO_NUMBER], "occupies": [-0.1, 1.1, INF, *NO_NUMBER],
    "factors": [1, None, "x", {"all_reduce": 0}, {"all_reduce": NAN}, {"bruck": 1.0}],
}  # fmt: skip
H100 = Cluster.preset("h100")
OF_CLUSTER: dict[str, list[Any]] = {
    "name": [1, "", "a\nb", None], "device": [1, None, "h100", {}], "links": [(), 1, None, "x", (1,), H100.links[0]],
    "group_sizes": [(), (8, 16), (0,), (True,), (1.5,), 8, None, ("8",)], "axis_links": [1, None, {"a": 1}, {"": H100.links[0]}],
    "groups": [1, None, "x", (1,), ("h100",)], "between": [1, None, "x", (1,), (H100.links[0],)],
}  # fmt: skip
OF_GROUP: dict[str, list[Any]] = {
    "name": [1, "", "a\nb", None], "device": [1, None, "h100", {}], "links": [(), 1, None, "x", (1,), H100.links[0]],
    "nodes": [0, *NO_WHOLE], "devices_per_node": [0, *NO_WHOLE], "speed": [0, INF, *NO_NUMBER],
    "group_sizes": [(8, 16), (0,), (True,), (1.5,), 8, None, ("8",)],
}  # fmt: skip
GROUP = {"name": "g", "device": H100.device, "nodes": 2, "devices_per_node": 8, "links": H100.links}
OF_RULE: dict[str, list[Any]] = {
    "equation": [1, None, "", "ab", "a->b->c", []], "reduce": [1, None, ["a"]], "keep": [1, None], "blocked": [1, None],
    "linear": [1, "a", None], "shapes": [1, None], "scaled": [1, None, []], "lower": [1, None, []],
    "flops": NO_NUMBER, "between": NO_NUMBER, "view": [None, *NO_FLAG], "random": NO_FLAG, "sizes": [1, None],
    "padded": [1, []], "zero": [1, "x"],
}  # fmt: skip
OF_PRECISION: dict[str, list[Any]] = {
    name: ["bf16", torch.int32, None, 1, [], NAN] for name in ("compute", "reduce", "master")
} | {"linear": ["fp8", torch.float8_e4m3fn, 1, [], NAN, True]}


@dataclasses.dataclass(frozen=True)
class Parallel:
    """The module and plan that methods are of, made once."""

    module: Any
    plan: Plan


def of(parallel: Parallel) -> list[tuple[str, Callable[..., Any], dict[str, Any], dict[str, list[Any]]]]:
    """Public functions: name, function, valid arguments, and bad values of each."""
    module, plan = parallel.module, parallel.plan
    optimizer: list[Any] = ["adamw", 1, [], torch.optim.SGD, Awkward()]
    state = {"model": NO_MODEL, "optimizer": optimizer}
    save: dict[str, list[Any]] = {
        **state, "folder": [None, *NO_PATH], "step": NO_WHOLE, "keep": [0, *NO_WHOLE], "wait": [None, *NO_FLAG],
        "sampler": [1, None, {}, Awkward()],
    }  # fmt: skip
    given = {"model": MODEL, "batch": BATCH}
    return [
        ("plan", autopar.plan, {**given, "cluster": "cpu", "axes": {"a": 2}}, OF_PLAN),
        ("parallelize", parallelize, {"model": MODEL, "mesh": None}, OF_PARALLELIZE),
        ("mesh", autopar.mesh, {}, {
            "axes": NO_AXES, "device": ["tpu", "", 1, True, [], Awkward()], "backend": ["ucc", "", 1, [], Awkward()]}),
        ("watch", watch, {"model": module, "callback": print}, {
            "model": NO_MODEL, "callback": [None, *NO_FUNCTION], "every": [0, None, *NO_WHOLE], "seconds": [None, INF, *NO_NUMBER]}),
        ("verify", autopar.verify, {**given, "axes": {"a": 2}}, OF_VERIFY),
        ("Search", Search, {}, OF_SEARCH),
        ("Settings", Settings, {"every": 8}, OF_SETTINGS),
        ("Compression", Compression, {"method": "powersgd", "rank": 2}, OF_COMPRESSION),
        ("Staleness", Staleness, {"staleness": 2}, OF_STALENESS),
        ("pins", lambda **pins: Search(pins=pins), {}, OF_PINS),
        ("stages", lambda **pins: Search(pins={"stages": 2, **pins}), {}, OF_STAGES),
        ("Device", Device, {"name": "d", "flops": {"float32": 1.0}, "memory": 1, "bandwidth": 1, "launch": 1}, OF_DEVICE),
        ("Link", Link, {"name": "l", "bandwidth": 1, "latency": 1}, OF_LINK),
        ("DeviceGroup", DeviceGroup, GROUP, OF_GROUP),
        ("Between", Between, {"link": H100.links[0]}, {"link": [1, None, "x"], "groups": [1, None, "a", ("a",), (1, 2)]}),
        ("Cluster", Cluster, {f.name: getattr(H100, f.name) for f in dataclasses.fields(H100)}, OF_CLUSTER),
        ("Cluster.preset", lambda preset: Cluster.preset(preset), {}, {"preset": ["h10", "", 1, None, [], b"h100"]}),
        ("Cluster.from_toml", Cluster.from_toml, {}, {"text": [1, None, b"", ["a"]]}),
        ("Cluster.load", Cluster.load, {}, {"path": [None, *NO_PATH]}),
        ("Cluster.save", H100.save, {}, {"path": [None, *NO_PATH]}),
        ("Cluster.resolve", lambda cluster: Cluster.resolve(cluster), {}, {"cluster": [None, *NO_PATH]}),
        ("Cluster.link_for", H100.link_for, {}, {"axis_sizes": [1, "a", None, [("a", 2)]]}),
        ("Precision", Precision, {}, OF_PRECISION),
        ("Float8", autopar.Float8, {}, {
            "scaling": ["rows", "", None, 1, [], b"rowwise"], "exclude": [None, "head", ["head"], ("",), (1,), {"head"}],
            "history": [0, -1, 1.5, None, "16", True, [], 8]}),
        ("Plan.save", plan.save, {}, {"path": [None, *NO_PATH]}),
        ("Plan.load", Plan.load, {}, {"path": [None, *NO_PATH]}),
        ("Plan.check", plan.check, given, {
            **{n: OF_PLAN[n] for n in ("model", "batch", "memory", "search", "loss_fn", "loss", "progress", "precision")},
            "deterministic": [None, *NO_FLAG],
        }),
        ("Rule", Rule, {"equation": "ab->ab"}, OF_RULE),
        ("Spec", Spec, {}, {"shape": [1, None, "ab", [1, 2]]}),
        ("Lowering", Lowering, {"build": print}, {"build": NO_FUNCTION, "together": [None, *NO_FLAG], "least": [0, None, *NO_WHOLE], "multiple": [0, None, *NO_WHOLE], "axes": [-1, None, *NO_WHOLE], "first": [None, *NO_FLAG], "places": [None, *NO_FLAG], "anywhere": [None, *NO_FLAG]}),
        ("rule", lambda target: rule(target), {}, {"target": [1, None, "", "mm", torch.mm, []]}),
        ("rule's function", lambda function: rule("no.such")(function), {}, {"function": NO_FUNCTION}),
        ("checkpoint.save", checkpoint.save, {"folder": "x", "model": module}, save),
        ("checkpoint.load", checkpoint.load, {"folder": "x", "model": module}, {
            **state, "folder": [None, *NO_PATH], "sampler": [1, None, {}]}),
        ("elastic", autopar.elastic, {"model": module}, {
            **state, "folder": NO_PATH, "save_every": [0, None, *NO_WHOLE], "keep": [0, None, *NO_WHOLE],
            "every": [0, None, *NO_WHOLE], "copies": [None, *NO_WHOLE], "ahead": [None, *NO_WHOLE],
            "sampler": [1, None, {}, Awkward()]}),
        ("checkpoint.torch_save", checkpoint.torch_save, {"checkpoint": {}, "path": "x", "model": module}, {
            "path": [None, *NO_PATH], "model": NO_MODEL}),
        ("checkpoint.export_safetensors", checkpoint.export_safetensors, {"folder": "x", "model": module}, {
            "model": NO_MODEL, "folder": [None, *NO_PATH], "max_shard_size": [None, *NO_SIZE],
            "dtype": ["bf16", torch.int32, 1, [], NAN]}),
        ("checkpoint.state_dict", checkpoint.state_dict, {"model": module}, state),
        ("checkpoint.load_state_dict", checkpoint.load_state_dict,
         {"model": module, "optimizer": None, "state": {}}, {**state, "state": [1, None, [], "x"]}),
        ("specialize", module.specialize, {}, {"batch": [*NO_BATCH, None]}),
        ("load_full_state_dict", module.load_full_state_dict, {}, {"state": [1, None, [], "x"]}),
        ("explain", module.explain, {}, {"name": NOT_TEXT}),
    ]  # fmt: skip


@pytest.fixture(scope="module")
def parallel() -> Parallel:
    module = autopar.parallelize(
        nn.Linear(4, 4), None, BATCH, cluster="cpu", loss_fn=lambda output, batch: output.sum()
    )
    return Parallel(module, module.plan)


@pytest.fixture
def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever begins to work fails, with another error."""

    def work(*_: Any, **__: Any) -> Any:
        raise AssertionError("work was begun")

    for place in ("autopar.compiler", "autopar.verify.verify"):
        monkeypatch.setattr(sys.modules[place], "captured", work)
    monkeypatch.setattr(compiler, "capture", work)
    monkeypatch.setattr(sys.modules["autopar.parallelize"], "distribute_parameters", work)


def has_remedy(text: str) -> bool:
    """An error says what to do: what is expected, what there is, or an example."""
    words = (
        r"expected|must|give|there (is|are)|write|use|pass|such as|known|did you mean|neither|remove|add|one of|at most"
    )
    return re.search(words, text) is not None


def faults(parallel: Parallel) -> Iterator[tuple[str, str, Any, str]]:
    """Bad arguments whose error is not as it should be, with what is wrong."""
    for name, function, valid, table in of(parallel):
        for argument, values in table.items():
            for value in values:
                where = name, argument, shown(value)
                try:
                    function(**{**valid, argument: value})
                except ValueError as e:
                    if argument not in str(e) or not has_remedy(str(e)) or len(str(e)) > 2000:
                        yield *where, f"says: {e}"
                except Exception as e:
                    yield *where, f"{type(e).__name__}: {e}"
                else:
                    yield *where, "was taken"


def test_bad_arguments_are_refused_by_name_before_any_work(parallel: Parallel, no_work: None) -> None:
    found = [*faults(parallel)]
    assert not found, "\n".join(map(str, found))
    assert sum(len(values) for _, _, _, table in of(parallel) for values in table.values()) >= 300


def test_every_argument_is_in_the_table(parallel: Parallel) -> None:
    """Of functions that take several: one that is added needs bad values here."""
    free = {"stateful", "extra", "checkpoint", "sampler", "dtype"}  # extra, checkpoint: whatever can be saved
    for name, function, _, table in of(parallel):
        if name in ("pins", "stages", "Device", "Link", "Rule", "Plan.check", "Spec") or name.startswith("rule"):
            continue
        known = {
            "cluster" if name == "Cluster.resolve" and p == "spec" else p
            for p in inspect.signature(function).parameters
        }
        assert known - free <= table.keys() | {"self"}, name


GOOD: list[tuple[Callable[..., Any], dict[str, list[Any]]]] = [
    (Search, {
        "time_limit": [0, 1, 0.5, INF], "gap": [0, 1e-3, 1], "seed": [0, 2**40], "recipe": [None, "ddp", "random"],
        "roles": [{}, {"a": "data"}], "pins": [
            {}, {"w": "R"}, {"w": ("S(0)", None)}, {"w": {"a": "S(0.1)"}}, {"stages": ["a"]}, {"stages": "search"},
            {"stages": 2, "schedule": "1f1b"}, {"stages": 2, "schedule": "no-such.csv"}, {"recompute": "gathers"},
            {"stages": 2, "schedule": [["0F0", "0B0"], ["1F0", "1B0"]]}],
    }),
]  # fmt: skip


def test_good_arguments_are_taken() -> None:
    for function, table in GOOD:
        for argument, values in table.items():
            for value in values:
                function(**{argument: value})


@pytest.mark.parametrize(
    ("search", "says"),
    [
        (Search(roles={"x": "data"}), r"roles= names axis 'x'; the mesh has a, b"),
        (Search(recipe="hsdp"), None),
        (Search(pins={"weight": {"x": "R"}}), r"pin 'weight' names axis 'x'; the mesh has a, b"),
        (Search(pins={"weight": ("R",)}), r"pin 'weight' must give one placement for each axis \(a, b\)"),
    ],
)
def test_axes_of_pins_and_roles_are_checked_first(search: Search, says: str | None, no_work: None) -> None:
    error: Any = AssertionError if says is None else ValueError
    with pytest.raises(error, match=says or "work was begun"):
        autopar.plan(MODEL, BATCH, cluster="cpu", axes={"a": 2, "b": 2}, search=search)


def test_two_losses_are_one_too_many(no_work: None) -> None:
    both: dict[str, Any] = {"loss": "loss", "loss_fn": print}
    for function, more in ((autopar.plan, {"cluster": "cpu"}), (autopar.verify, {"axes": {"a": 2}})):
        with pytest.raises(ValueError, match=r"loss= picks .* pass one of them"):
            function(MODEL, BATCH, **more, **both)  # type: ignore[operator]


def test_kinds() -> None:
    assert [whole(1)(v) is None for v in (1, 5, 0, True, 2.0)] == [True, True, False, False, False]
    assert [number(0)(v) is None for v in (0, INF, NAN)] == [True, False, False]
    assert number(0, infinite=True)(INF) is None and number(0, above=True)(0) is not None
    assert [SIZE(v) is None for v in ("70GiB", 1, 0.5, "1e3MB", 0)] == [True, True, False, True, False]
    assert AXES({"node": 32, "gpu": 8}) is None
    assert shown("x" * 200) == "<str>" and shown("a\nb") == "'a\\nb'" and shown(Awkward()) == "<Awkward>"
    with pytest.raises(ValueError, match=r"seed=-1: expected a whole number from 0"):
        require(seed=(-1, whole(0)))
    with pytest.raises(ValueError, match="more than any device has"):
        parse_bytes("1e999999999")
    assert not math.isnan(parse_bytes("1.5KiB"))


@pytest.mark.parametrize(
    "words",
    [
        "plan --axes a=0", "plan --axes a", "plan --axes a=9999999999999", "plan --memory nan", "plan --memory 1e400GiB",
        "plan --memory -1", "plan --optimizer lion", "plan --precision int8", "plan --recipe fastest", "plan --pin w",
        "plan --roles a=x", "plan --roles x=data", "plan --time-limit nan", "plan --time-limit -1", "plan --stages 0",
        "plan --stages -1", "plan --microbatches 0", "plan --virtual 0", "plan --cluster h10", "plan --cluster /",
        "plan --pin w=Q@a", "plan --pin w=R@x", "plan --schedule 1f1b --stages 2 --virtual -1", "plan --save /no/x.json",
        "plan --report /no/x.html", "verify --tolerance nan", "verify --tolerance -1", "verify --seed -1",
        "verify --axes a=x", "verify --plan /no.json", "verify --plan /", "verify --microbatches 0", "check /no.json",
        "check /", "diff /no.json /no.json", "simulate --schedule 1f2b --stages 2 --microbatches 2 --forward 1 "
        "--backward-input 1 --backward-weight 1", "simulate --schedule 1f1b --stages 2 --microbatches 2 --forward nan "
        "--backward-input 1 --backward-weight 1", "calibrate --save /no/x.toml", "calibrate --save x.toml --dtypes int8",
        "calibrate --save x.toml --groups 0", "calibrate --save x.toml --ranks 0", "calibrate --save x.toml --timeout nan",
        "trace --axes a=0", "trace --axes a=2 --steps 0", "trace --axes a=2 --save /no/x.json", "trace --axes a=2 --plan /no.json",
        "trace --axes a=99", "run no.py", "run --axes a=2 net.py", "run --restarts -1 net.py",
        "ops --workers 0", "explain w --why-not Q@a", "explain w --axes a=0",
    ],
)  # fmt: skip
def test_options_of_the_command(words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(
        "import torch\nfrom torch import nn\n\n"
        "def make():\n    return nn.Linear(4, 4), (torch.zeros(2, 4),), lambda output, batch: output.sum()\n"
    )
    command, *given = words.split()
    if command in ("plan", "verify", "explain", "check", "trace"):
        defaults = {"--model": "net.py:make", "--axes": "a=2", "--cluster": "cpu"}
        defaults |= {"--save": "x.json"} if command == "trace" else {}
        left_out = {"verify": ["--cluster"], "check": ["--cluster", "--axes"]}.get(command, [])
        given += [w for n, v in defaults.items() if n not in (*given, *left_out) for w in (n, v)]
    found = CliRunner().invoke(cli.app, [command, *given])
    assert found.exit_code == 2, found.output
    assert found.exception is None or isinstance(found.exception, SystemExit), found.exception
    assert "rror" in found.output and "Traceback" not in found.output
