"""Plans of earlier searches: the second is read, whatever is another search is not, and no file can do harm."""

from __future__ import annotations

import logging
import os
import re
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import autopar
from autopar import Search, cli
from autopar.compiler import program_of, program_to_plan, solve
from autopar.costs.cluster import Cluster
from autopar.ir.layout import Replicate
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.ir.quantized.axes import QuantizedAxis
from autopar.search import cache
from autopar.search import padding as padded
from autopar.search.formulation.pins import Restrictions
from autopar.search.options import Job
from autopar.sharding.dims import Dims, analyze
from tests import models as zoo
from tests.capture.test_repeat import Deep

AXES = {"a": 2, "b": 2}


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "plans"))
    return tmp_path / "plans"


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[Search]:
    """Grows by one with every search."""
    ran: list[Search] = []
    real = padded.find_plan

    def counted(program: Program, dims: Dims, job: Job, *rest: Any) -> Plan:
        ran.append(job.search)
        return real(program, dims, job, *rest)

    monkeypatch.setattr(padded, "find_plan", counted)
    return ran


def planned(**options: Any) -> Plan:
    program, _, _ = zoo.captured("mlp")
    return solve(program, AXES, "cpu", **options)


def test_the_second_search_is_read(kept: Path, searches: list[Search], caplog: pytest.LogCaptureFixture) -> None:
    phases: list[str] = []
    first = planned()
    assert len(searches) == len(list(kept.iterdir())) == 1
    with caplog.at_level(logging.INFO, "autopar"):
        again = planned(progress=lambda phase, incumbent, bound: phases.append(phase))
    assert again == first
    assert len(searches) == 1
    assert "plan of an earlier search, from" in caplog.text
    assert [p for p in phases if "earlier search" in p]


def test_parallelize_reads_what_it_searched(kept: Path, searches: list[Search]) -> None:
    losses = []
    for _ in range(2):
        torch.manual_seed(0)
        model, batch = zoo.mlp()
        parallel = autopar.parallelize(model, None, batch)
        losses.append(float(parallel(**batch).detach()))
    assert len(searches) == 1
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    "search",
    [Search(recipe="random"), Search(cache=False), Search(time_limit=0.0), Search(check=True)],
    ids=["random", "off", "cut short", "checked"],
)
def test_what_is_not_kept(kept: Path, search: Search) -> None:
    planned(search=search)
    assert not kept.exists()


@pytest.mark.parametrize("off", ["", "0"])
def test_the_variable_turns_it_off(off: str, monkeypatch: pytest.MonkeyPatch, searches: list[Search]) -> None:
    monkeypatch.setenv(cache.VARIABLE, off)
    assert cache.folder() is None
    planned()
    planned()
    assert len(searches) == 2


def test_the_default_is_below_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(cache.VARIABLE)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.folder() == tmp_path / ".cache" / "autopar"


# --- the key


Ingredients = dict[str, Any]


@pytest.fixture(scope="module")
def ingredients() -> Iterator[Ingredients]:
    program, dims, _ = zoo.captured("mlp")
    yield {
        "program": program,
        "dims": dims,
        "axes": AXES,
        "cluster": Cluster.preset("cpu"),
        "memory": 1e9,
        "optimizer": "adamw",
        "search": Search(),
        "restrictions": Restrictions(),
    }


def name_of(ingredients: Ingredients) -> str:
    named = dict(ingredients)
    program, dims = named.pop("program"), named.pop("dims")
    file = cache.file_of(program, dims, Job(**named))
    assert file is not None
    return file.name


def other_rule(dims: Dims) -> Dims:
    """As if somebody had edited the rule of one operator."""
    node, operator = next(iter(dims.operators.items()))
    return replace(dims, operators={**dims.operators, node: replace(operator, rule=replace(operator.rule, flops=7.0))})


CLUSTER = Cluster.preset("cpu")
CHANGES: dict[str, Callable[[Ingredients], Ingredients]] = {
    "sizes of axes": lambda i: {"axes": {"a": 4, "b": 2}},
    "names of axes": lambda i: {"axes": {"x": 2, "b": 2}},
    "order of axes": lambda i: {"axes": {"b": 2, "a": 2}},
    "a figure of the cluster": lambda i: {
        "cluster": replace(CLUSTER, device=replace(CLUSTER.device, launch=2 * CLUSTER.device.launch))
    },
    "memory": lambda i: {"memory": 2e9},
    "no limit of memory": lambda i: {"memory": None},
    "optimizer": lambda i: {"optimizer": "sgd"},
    "restrictions": lambda i: {"restrictions": Restrictions(layouts={("batch", "0"): (Replicate(), Replicate())})},
    "local rows": lambda i: {"restrictions": Restrictions(data_axes_only=True)},
    "a rule": lambda i: {"dims": other_rule(i["dims"])},
    "which result is the loss": lambda i: {"program": replace(i["program"], loss=1)},
    "another model": lambda i: dict(zip(("program", "dims"), zoo.captured("residual"), strict=False)),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_each_ingredient_counts(change: Callable[..., Ingredients], ingredients: Ingredients, kept: Path) -> None:
    assert name_of({**ingredients, **change(ingredients)}) != name_of(ingredients)
    assert name_of(dict(ingredients)) == name_of(ingredients)


OTHER = {
    "time_limit": 61.0, "gap": 1e-2, "pins": {"up.weight": "R"}, "recipe": "ddp", "roles": {"a": "data"}, "seed": 1,
    "tie_layers": False, "padding": False, "inexact": ("compressed",), "quantized": {"a": {"weights": 8}},
    "imbalance": (3.0, 1.0),
}  # fmt: skip


@pytest.mark.parametrize("name", [f.name for f in fields(Search) if f.name not in ("cache", "check")])
def test_each_option_of_the_search_counts(name: str, ingredients: Ingredients, kept: Path) -> None:
    allowed = {"inexact": ("quantized",)} if name == "quantized" else {}
    usual = {**ingredients, "search": Search(**allowed)}
    assert name_of({**ingredients, "search": Search(**{name: OTHER[name]}, **allowed)}) != name_of(usual)


def test_versions_count(ingredients: Ingredients, kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = name_of(ingredients)
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    newer = name_of(ingredients)
    monkeypatch.setattr(cache, "_sources", lambda: "edited")
    assert len({own, newer, name_of(ingredients)}) == 3


def test_sources_are_all_of_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "package"
    for name in ("cache.py", "linked/rule.py", "data/h100.toml"):
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text("1")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "pass.py").write_text("1")
    (package / "passes").symlink_to(tmp_path / "outside")
    monkeypatch.setattr(cache, "__file__", str(package / "search" / "cache.py"))
    seen = {cache._sources.__wrapped__()}
    for name in ("cache.py", "linked/rule.py", "data/h100.toml", "passes/pass.py"):
        (package / name).write_text("2")
        seen.add(cache._sources.__wrapped__())
    assert len(seen) == 5


def test_depth_and_what_is_left_out_count(ingredients: Ingredients, kept: Path) -> None:
    """Of 5 and of 9 alike blocks the same three are captured."""
    batch = torch.zeros(8, 4), torch.zeros(8, 8)
    programs = [program_to_plan(Deep(5), batch), program_to_plan(Deep(9), batch), program_of(Deep(9), batch)]
    assert [p.repeat and p.repeat.blocks for p in programs] == [5, 9, None]
    names = {name_of({**ingredients, "program": p, "dims": analyze(p)}) for p in programs}
    assert len(names) == 3


# --- files


def corrupt(file: Path, how: str) -> None:
    text = file.read_text()
    file.write_bytes({"empty": b"", "cut": text[: len(text) // 2].encode(), "bytes": b"\xff\x00"}.get(how, b"{}"))
    if how == "another program":
        plan = replace(planned(search=Search(cache=False)), fingerprint="0" * 16)
        plan.save(file)


@pytest.mark.parametrize("how", ["empty", "cut", "bytes", "no plan", "another program"])
def test_a_damaged_file_is_searched_again(
    how: str, kept: Path, searches: list[Search], caplog: pytest.LogCaptureFixture
) -> None:
    first = planned()
    (file,) = kept.iterdir()
    corrupt(file, how)
    searches.clear()
    assert planned() == first
    assert len(searches) == 1
    assert "searched again" in caplog.text
    assert Plan.load(file) == first
    assert planned() == first
    assert len(searches) == 1


@pytest.mark.parametrize("pins", [{"up.weight": ("R", "S(1)")}, {"batch.0": ("R", "R")}, {"up": ("R", "S(1)")}])
def test_a_plan_that_is_not_as_pinned_is_searched_again(
    pins: dict[str, Any], kept: Path, searches: list[Search], caplog: pytest.LogCaptureFixture
) -> None:
    pinned, other = planned(search=Search(pins=pins)), planned(search=Search(cache=False, recipe="ddp"))
    (file,) = kept.iterdir()
    assert planned(search=Search(pins=pins)) == pinned  # which is read
    assert "searched again" not in caplog.text
    other.save(file)
    searches.clear()
    assert planned(search=Search(pins=pins)) == pinned
    assert len(searches) >= 1 and re.search(r"searched again: .*PlanError: .*pinned", caplog.text)


def test_a_folder_that_cannot_be_written_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "file" / "plans"))
    planned()
    planned()
    assert caplog.text.count("plans are not cached") == 1
    assert cache.VARIABLE in caplog.text


def test_writers_at_the_same_time_do_no_harm(kept: Path, caplog: pytest.LogCaptureFixture) -> None:
    program, _, _ = zoo.captured("mlp")
    plan, job = planned(search=Search(cache=False)), Job(AXES, CLUSTER)
    file = kept / "plan.json"
    read: list[Plan | None] = []

    def work() -> None:
        for _ in range(20):
            cache.store(file, plan)
            read.append(cache.load(file, program, job))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(read) == 80
    assert all(found == plan for found in read)
    assert "searched again" not in caplog.text
    assert list(kept.iterdir()) == [file]


def test_the_oldest_make_room(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "MOST_PLANS", 3)
    plan = planned(search=Search(cache=False))
    for i in range(5):
        cache.store(kept / f"{i}.json", plan)
        os.utime(kept / f"{i}.json", (i, i))
    assert sorted(f.name for f in kept.iterdir()) == ["2.json", "3.json", "4.json"]


# --- folders and files that others may have written


def test_the_folder_is_the_users_own(kept: Path) -> None:
    planned()
    assert stat.S_IMODE(kept.stat().st_mode) == 0o700
    assert [stat.S_IMODE(file.stat().st_mode) for file in kept.iterdir()] == [0o600]


def world_writable(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.chmod(0o707)


def of_another_user(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: own + 1)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (world_writable, "everybody may write to the folder .*plans; chmod go-w it, or set AUTOPAR_CACHE"),
        (of_another_user, r"the folder .*plans belongs to user \d+, not to \d+; set AUTOPAR_CACHE to your own"),
    ],
)
def test_a_folder_that_others_may_write_to_is_not_used(
    change: Callable[[Path, pytest.MonkeyPatch], None],
    says: str,
    kept: Path,
    searches: list[Search],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    planned()
    (file,) = kept.iterdir()
    written = file.stat().st_mtime_ns
    change(kept, monkeypatch)
    planned()
    assert len(searches) == 2
    assert re.search(f"plans are not cached: {says}", caplog.text)
    assert [f.stat().st_mtime_ns for f in kept.iterdir()] == [written]
    # Also where the folder was made after the first look.
    caplog.clear()
    cache.store(kept / "other.json", planned(search=Search(cache=False)))
    assert re.search(f"the plan is not cached: {says}", caplog.text)
    assert [f.name for f in kept.iterdir()] == [file.name]


def test_a_group_may_write(kept: Path, searches: list[Search]) -> None:
    """As the folders of earlier versions are, where each user is a group."""
    planned()
    kept.chmod(0o775)
    planned()
    assert len(searches) == 1


def fifo(file: Path) -> None:
    os.mkfifo(file)


def link(file: Path) -> None:
    other = file.with_name("elsewhere")
    replace(planned(search=Search(cache=False)), optimizer="sgd").save(other)
    file.symlink_to(other)


def huge(file: Path) -> None:
    with file.open("wb") as opened:
        opened.truncate(2**40)


def deep(file: Path) -> None:
    file.write_text("[" * 100_000)


@pytest.mark.parametrize("put", [fifo, link, huge, deep, Path.mkdir])
def test_only_regular_files_are_read(
    put: Callable[[Path], None], kept: Path, searches: list[Search], caplog: pytest.LogCaptureFixture
) -> None:
    first = planned()
    (file,) = kept.iterdir()
    file.unlink()
    put(file)
    searches.clear()
    assert planned() == first
    assert searches
    assert "searched again" in caplog.text
    if put is not Path.mkdir:  # a folder stays: what is in it is none of ours
        assert file.is_file() and not file.is_symlink()
        assert Plan.load(file) == first


def test_what_killed_writers_have_left_is_deleted(kept: Path) -> None:
    kept.mkdir()
    for name, age in (("old.tmp", 2 * cache.LEFT_BEHIND), ("young.tmp", 1.0), ("others.txt", 1e9)):
        (kept / name).write_text("")
        when = time.time() - age
        os.utime(kept / name, (when, when))
    planned()
    assert sorted(f.suffix for f in kept.iterdir()) == [".json", ".tmp", ".txt"]
    assert (kept / "young.tmp").exists()


def other_layouts(plan: Plan) -> Plan:
    """Of a plan that is right, and worse, under the name of the best."""
    worse = planned(search=Search(recipe="random", seed=1))
    return replace(worse, certificate=plan.certificate, predicted=plan.predicted)


FORGED: dict[str, tuple[Callable[[Plan], Plan], str]] = {
    "layouts": (other_layouts, "does not cost what it says: certificate.objective is"),
    "objective": (
        lambda p: replace(p, certificate=replace(p.certificate, objective=2 * p.certificate.objective)),
        "certificate.objective is .* and should be",
    ),
    "seconds": (
        lambda p: replace(p, predicted=replace(p.predicted, step_seconds=p.predicted.step_seconds / 2)),
        "predicted.step_seconds is .* and should be",
    ),
    "memory": (
        lambda p: replace(p, predicted=replace(p.predicted, peak_bytes={"parameters": 1.0})),
        "predicted.peak_bytes.parameters is 1 and should be",
    ),
    "no memory": (lambda p: replace(p, predicted=replace(p.predicted, peak_bytes={})), "its peak of .* is above"),
    "traffic": (
        lambda p: replace(p, predicted=replace(p.predicted, communication_bytes={"a": 1.0, "b": 0.0})),
        "predicted.communication_bytes.a is 1 and should be",
    ),
    "program": (lambda p: replace(p, fingerprint="0" * 16), "it is of another program"),
    "torch": (lambda p: replace(p, torch="2.0.0"), "it is of another version of torch"),
    "optimizer": (lambda p: replace(p, optimizer="sgd"), "it is of another optimizer"),
    "few bits": (lambda p: replace(p, quantized=(QuantizedAxis("a", 8),)), "it is of another precision of messages"),
    "copies": (lambda p: replace(p, secondary=("a",)), "it is of another secondary copy"),
    "cluster": (lambda p: replace(p, cluster=Cluster.preset("h100")), "it is of another cluster"),
    "axes": (lambda p: replace(p, axes=(("b", 2), ("a", 2))), "it is of another mesh"),
    "choices": (lambda p: replace(p, choices={}), "PlanError"),
    "parameters": (lambda p: replace(p, parameters={}), "searched again"),
    "padding": (lambda p: replace(p, padding={"up.weight": (64, 16)}), "searched again"),
    "microbatches": (lambda p: replace(p, microbatches=3), "searched again"),
}


@pytest.mark.parametrize("name", FORGED)
def test_forged_plans_are_found_out(
    name: str, kept: Path, searches: list[Search], caplog: pytest.LogCaptureFixture
) -> None:
    forge, says = FORGED[name]
    first = planned(memory=1e9)
    (file,) = kept.iterdir()
    forge(first).save(file)
    searches.clear()
    assert planned(memory=1e9) == first
    assert searches
    assert re.search(says, caplog.text)
    assert Plan.load(file) == first


def test_a_budget_is_kept_whatever_a_file_says(kept: Path, searches: list[Search]) -> None:
    """The plan of a larger budget, under the name of one of a smaller."""
    roomy = planned(memory=1e9)
    (file,) = kept.iterdir()
    needed = sum(roomy.predicted.peak_bytes.values())
    program, dims, _ = zoo.captured("mlp")
    small = cache.file_of(program, dims, Job(AXES, CLUSTER, memory=0.9 * needed))
    assert small is not None
    file.rename(small)
    assert cache.load(small, program, Job(AXES, CLUSTER, memory=0.9 * needed)) is None
    assert cache.load(small, program, Job(AXES, CLUSTER, memory=needed)) == roomy


def test_bounds_of_files_are_claims(kept: Path) -> None:
    first = planned()
    (file,) = kept.iterdir()
    bound = 0.999 * first.certificate.objective
    replace(first, certificate=replace(first.certificate, lower_bound=bound)).save(file)
    read = planned()
    assert (first.certificate.claimed, read.certificate.claimed) == (False, True)
    assert read.certificate.lower_bound == bound
    _, batch = zoo.mlp()
    claims = [autopar.parallelize(zoo.mlp()[0], None, batch).plan.certificate.claimed for _ in range(2)]
    assert claims == [False, True]


@pytest.mark.parametrize(
    "pins", [{"stages": 2, "microbatches": 2}, {"microbatches": 2}], ids=["stages", "microbatches"]
)
def test_plans_of_pipelines_are_read_too(pins: dict[str, Any], kept: Path) -> None:
    phases: list[str] = []
    first = planned(search=Search(pins=pins))
    again = planned(search=Search(pins=pins), progress=lambda phase, incumbent, bound: phases.append(phase))
    assert again == first
    assert [p for p in phases if "earlier search" in p]


SEARCH = """
import autopar
from torch import nn, zeros

plan = autopar.plan(nn.Linear(16, 16), (zeros(8, 16),), cluster="cpu", axes={"a": 2, "b": 2})
"""


def test_another_process_reads_it(kept: Path, searches: list[Search]) -> None:
    """Under another hash seed."""
    environment = {**os.environ, "PYTHONHASHSEED": "1", "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", SEARCH], env=environment, check=True)
    names: dict[str, Any] = {}
    exec(SEARCH, names)
    assert searches == []
    assert [Plan.load(file) for file in kept.iterdir()] == [names["plan"]]


def test_the_command_can_search_anew(kept: Path, tmp_path: Path, searches: list[Search]) -> None:
    (tmp_path / "net.py").write_text(
        "import torch\nfrom torch import nn\n\n"
        "def make():\n    return nn.Linear(16, 16), (torch.zeros(8, 16),), lambda output, batch: output.sum()\n"
    )
    words = ["plan", "--model", f"{tmp_path / 'net.py'}:make", "--cluster", "cpu", "--axes", "a=2"]
    counts, shown = [], []
    for more in ([], [], ["--no-cache"]):
        shown.append(CliRunner().invoke(cli.app, [*words, *more]).stdout)
        counts.append(len(searches))
    assert 0 < counts[0] == counts[1] < counts[2]
    assert shown[0] == shown[2]
    # What is read is the same but for one line: its bound is a claim.
    new = [line for line in shown[1].splitlines() if line not in shown[0].splitlines()]
    assert new and new[0].startswith("verified     not here: these are the words of a file")
