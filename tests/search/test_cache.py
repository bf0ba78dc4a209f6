"""Plans of earlier searches: the second is read, whatever is another search is not, and no file can do harm."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
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
    "search", [Search(recipe="random"), Search(cache=False), Search(time_limit=0.0)], ids=["random", "off", "cut short"]
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
    "tie_layers": False, "padding": False, "check": True,
}  # fmt: skip


@pytest.mark.parametrize("name", [f.name for f in fields(Search) if f.name != "cache"])
def test_each_option_of_the_search_counts(name: str, ingredients: Ingredients, kept: Path) -> None:
    assert name_of({**ingredients, "search": Search(**{name: OTHER[name]})}) != name_of(ingredients)


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


def test_a_folder_that_cannot_be_written_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "file" / "plans"))
    planned()
    assert "the plan is not cached" in caplog.text
    assert cache.VARIABLE in caplog.text


def test_writers_at_the_same_time_do_no_harm(kept: Path, caplog: pytest.LogCaptureFixture) -> None:
    program, _, _ = zoo.captured("mlp")
    plan = planned(search=Search(cache=False))
    file = kept / "plan.json"
    read: list[Plan | None] = []

    def work() -> None:
        for _ in range(20):
            cache.store(file, plan)
            read.append(cache.load(file, program))

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
    counts, shown = [], set()
    for more in ([], [], ["--no-cache"]):
        shown.add(CliRunner().invoke(cli.app, [*words, *more]).stdout)
        counts.append(len(searches))
    assert 0 < counts[0] == counts[1] < counts[2]
    assert len(shown) == 1
