"""The page of a plan: its data are the plan's and the simulation's, and a real browser draws it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import autopar
from autopar import cli
from autopar.cli.options import WRONG_INPUT
from autopar.compiler import program_of, solve
from autopar.costs.cluster import Cluster
from autopar.costs.memory import format_bytes
from autopar.explain import what_if as whatif
from autopar.explain.html import report_page
from autopar.explain.recipes import compare_recipes, find_plan
from autopar.explain.what_if import memory_of, needed_by, what_if
from autopar.ir.plan import Plan
from autopar.search.options import Search
from tests import browser
from tests.distributed.models import slow_devices

pytestmark = pytest.mark.thorough  # of two budgets the larger one has the faster plan

AXES = {"a": 4}
BUDGET = 60_000.0


class Named(nn.Module):
    """Layers whose names end a script element, if a page lets them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 64)
        self.add_module("</script><b>", nn.Linear(64, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.get_submodule("</script><b>")(torch.relu(self.first(x))).square().mean()


@pytest.fixture(scope="module")
def made() -> tuple[nn.Module, dict[str, torch.Tensor], Plan, str]:
    model, batch = Named(), {"x": torch.zeros(16, 32)}
    found = find_plan(model, batch, cluster=slow_devices(), axes=AXES, memory=BUDGET)
    return model, batch, found.plan, report_page(model, batch, found.plan, compare_recipes(found), budget=BUDGET)


def data_of(page: str) -> dict[str, Any]:
    found = re.search(r'<script id="data" type="application/json">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    data: dict[str, Any] = json.loads(found[1])
    return data


@pytest.mark.slow
def test_the_data_are_those_of_the_plan(made: tuple[nn.Module, dict[str, torch.Tensor], Plan, str]) -> None:
    _, _, found, page = made
    data = data_of(page)
    assert data["title"] == f"Named on {found.cluster.name}"
    assert {m["path"] for m in data["modules"]} >= {"first", "</script><b>"}
    assert {t["axis"]: t["bytes"] for t in data["traffic"]} == {
        axis: found.predicted.communication_bytes.get(axis, 0.0) for axis in AXES
    }
    own = data["recipes"][0]
    assert (own["name"], own["seconds"]) == ("this plan", found.predicted.step_seconds)
    assert {r["name"] for r in data["recipes"]} >= {"ddp", "fsdp", "megatron"}
    line = data["timeline"]
    assert line["streams"][0] == "compute"
    assert len(line["tasks"]) > 10
    ends = [start + long for _, _, start, long, _ in line["tasks"]]
    assert max(data["memory"]["times"]) <= max(ends) + 1e-3
    held = sum(max(values) for values in data["memory"]["categories"].values())
    assert held >= found.predicted.memory_bytes["parameters"]
    assert "http" not in page.replace("http-equiv", "")  # nothing is loaded


@pytest.mark.slow
def test_what_if(made: tuple[nn.Module, dict[str, torch.Tensor], Plan, str], monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch, found, page = made
    cases = data_of(page)["whatif"]
    assert len(cases) == 27
    assert {(c["devices"], c["samples"]) for c in cases} == {(d, n) for d in (2, 4, 8) for n in (8, 16, 32)}
    by_case = {(c["devices"], c["budget"], c["samples"]): c for c in cases}
    same = by_case[4, BUDGET, 16]
    assert [c for c in cases if c["chosen"]] == [same]
    assert (same["seconds"], same["memory"]) == (found.predicted.step_seconds, needed_by(found))
    assert needed_by(found) > memory_of(found)
    for case in cases:
        assert (case["seconds"] is None) == bool(case["reason"])
        assert case["memory"] is None or case["memory"] <= case["budget"]
        more = by_case.get((case["devices"], 2 * case["budget"], case["samples"]))
        if more is not None and case["seconds"] is not None:
            assert more["seconds"] is not None
            assert more["seconds"] <= case["seconds"] * 1.01  # of the gap
    monkeypatch.setattr(whatif, "FACTORS", (0.5, 1.0))
    ticks: list[tuple[int, int, str]] = []
    search = Search(pins={"microbatches": 1}, recipe="ddp")
    scarce = what_if(model, batch, found, budget=2000.0, search=search, tick=lambda *t: ticks.append(t))
    assert len(scarce) == 8 == ticks[-1][0] == ticks[-1][1]
    assert all("needs" in c.reason and "more than the budget of" in c.reason for c in scarce if not c.given)
    by_size = [c for c in scarce if (c.devices, c.samples) == (2, 8)]
    assert len({c.reason for c in by_size}) == len({c.budget for c in by_size})


def test_batches_of_other_sizes_have_the_names_of_the_first() -> None:
    """Named out of the order of the model's arguments: by position, each would be the other."""
    found = dict(whatif._batches({"y": torch.zeros(4, 2), "x": torch.zeros(4, 3)}))
    assert {n: {k: tuple(t.shape) for k, t in batch.items()} for n, batch in found.items()} == {
        n: {"y": (n, 2), "x": (n, 3)} for n in (2, 4, 8)
    }


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("others", "samples"),
    [
        ({}, {8, 16, 32}),
        ({"scale": torch.zeros(3)}, {8, 16, 32}),
        ({"scale": torch.tensor(2.0)}, {8, 16, 32}),
        ({"scale": torch.zeros(1, 32)}, {8, 16, 32}),
        ({"x": torch.zeros(())}, {0}),
    ],
)
def test_samples_are_those_of_most_tensors(others: dict[str, torch.Tensor], samples: set[int]) -> None:
    """A number, or a table for all samples, has no rows to scale: it hid all batches of other sizes."""

    class Two(Named):
        def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
            return super().forward(x.expand(16, 32) if x.ndim == 0 else x) * (1 if scale is None else scale.sum())

    model, batch = Two(), {"x": torch.zeros(16, 32), **others}
    search = Search(recipe="ddp" if 16 in samples else None)
    found = find_plan(model, batch, cluster=slow_devices(), axes={"a": 2}, search=search).plan
    cases = what_if(model, batch, found, budget=1e9, search=search)
    assert {c.devices for c in cases} == {1, 2, 4}
    assert {c.samples for c in cases} == samples
    assert not [c.reason for c in cases if c.reason]
    by_samples = {c.samples: c.memory_bytes for c in cases if c.devices == 1 and c.budget == 1e9}
    assert len(set(by_samples.values())) == len(samples)


class Particular(Named):
    """It takes one size of batch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] != 16:
            raise LookupError(f"sixteen samples, not {x.shape[0]}")
        return super().forward(x)


@pytest.mark.slow
def test_the_true_reason_is_shown() -> None:
    """What does not fit, and what is not possible for another reason, are told apart."""
    model, batch = Particular(), {"x": torch.zeros(16, 32)}
    found = find_plan(model, batch, cluster=slow_devices(), axes={"a": 2}, search=Search(recipe="ddp")).plan
    ticks: list[int] = []
    search = Search(recipe="ddp", pins={"microbatches": 1})
    cases = what_if(model, batch, found, budget=2000.0, search=search, tick=lambda *t: ticks.append(t[0]))
    assert ticks == [*range(1, len(cases) + 1)]
    for case in (c for c in cases if not c.given):
        if case.samples == 16:
            assert case.needed is not None and case.needed > case.budget
            assert case.reason.startswith("needs ")
        else:
            assert case.needed is None
            assert f"sixteen samples, not {case.samples}" in case.reason


@pytest.mark.slow
def test_figures_of_memory_agree(made: tuple[nn.Module, dict[str, torch.Tensor], Plan, str]) -> None:
    """The peak is what the budget is about, at every place of the page."""
    _, _, found, page = made
    data = data_of(page)
    facts = dict(data["facts"])
    needed = needed_by(found)
    assert facts["peak memory per device, of the budget"] == f"{format_bytes(needed)} of {format_bytes(BUDGET)}"
    assert facts["of that between steps"] == format_bytes(memory_of(found))
    assert data["recipes"][0]["memory"] == needed
    assert [c["memory"] for c in data["whatif"] if c["chosen"]] == [needed]
    assert f"the budget is about the peak of the plan's graph, {format_bytes(needed)}" in data["memory"]["caption"]
    simulated = max(map(sum, zip(*data["memory"]["categories"].values(), strict=True)))
    assert f"At most {format_bytes(simulated)} here" in data["memory"]["caption"]
    assert all(c["memory"] is None or c["memory"] <= c["budget"] for c in data["whatif"])


EVIL = (
    "<img src=x onerror=alert(1)>", "a\"b'c", "new\nraise SystemExit(7)\n#", "</script><!--", "{{7*7}}", "/*DATA*/",
    "\u2028",
)  # fmt: skip
"""Names that would be markup or code, if anything took them for that."""


class Evil(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name in EVIL:
            self.add_module(name, nn.Linear(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name in EVIL:
            x = torch.relu(self._modules[name](x))  # type: ignore[misc]
        return x.square().mean()


@pytest.mark.slow
def test_names_are_neither_code_nor_markup(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whatif, "FACTORS", (1.0,))
    torch.manual_seed(0)
    model, batch = Evil(), {"x": torch.randn(16, 8)}
    expected = model(**batch)
    expected.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    plan = find_plan(model, batch, cluster="cpu", axes={"a": 2}, search=Search(recipe="ddp")).plan
    page = report_page(model, batch, plan, (), budget=1e9, search=Search(recipe="ddp"))
    assert {m["path"] for m in data_of(page)["modules"]} >= set(EVIL)
    head, data, tail = re.split(r'(?<=type="application/json">)(.*?)(?=</script>)', page, maxsplit=1, flags=re.DOTALL)
    assert "<" not in data and "\n" not in data
    assert not any(name in head + tail for name in EVIL if name != "\u2028")
    module = autopar.parallelize(model, None, batch, cluster="cpu")
    loss = module(**batch)
    loss.backward()
    torch.testing.assert_close(loss, expected)
    for name, gradient in module.full_gradients().items():
        torch.testing.assert_close(gradient, gradients[name])
    for graph in (module.forward_graph, module.backward_graph, module.logical_graph):
        assert graph is not None
        assert "SystemExit" not in graph.code and "<img" not in graph.code
    assert Plan.from_dict(module.plan.to_dict()) == module.plan
    # The table has names as text; line breaks in them are the reader's problem, not the terminal's markup.
    assert "<img" in module.plan.summary()


ACTS = """
<script>
const seen = document.documentElement.dataset;
const hidden = () => [...document.querySelectorAll("#modules tr")].filter(r => r.hidden).length;
const fold = document.querySelector("button.fold");
if (fold) { fold.click(); seen.hidden = hidden(); fold.click(); seen.shown = hidden(); }
seen.rows = document.querySelectorAll("#modules tr").length;
seen.cells = document.querySelectorAll("#whatif td.number").length;
const canvas = document.getElementById("timeline"), box = canvas.getBoundingClientRect();
const pixels = c => new Set(new Uint32Array(c.getContext("2d").getImageData(0, 0, c.width, c.height).data.buffer)).size;
seen.colors = pixels(canvas); seen.areas = pixels(document.getElementById("memory"));
const at = x => ({ clientX: box.left + x, clientY: box.top + 13, bubbles: true, cancelable: true, pointerId: 1 });
for (let x = 111; x < box.width && !seen.task; x++) {
  canvas.dispatchEvent(new PointerEvent("pointermove", at(x)));
  seen.task = document.getElementById("task").textContent.trim();
}
const before = seen.drawn;
for (let i = 0; i < 20; i++) canvas.dispatchEvent(new WheelEvent("wheel", { ...at(111), deltaY: -1 }));
seen.fewer = Number(seen.drawn) < Number(before);
canvas.dispatchEvent(new MouseEvent("dblclick", at(111)));
seen.again = seen.drawn === before;
</script>
"""


@pytest.mark.skipif(bool(browser.missing()), reason=browser.missing())
def test_a_browser_draws_it(made: tuple[nn.Module, dict[str, torch.Tensor], Plan, str], tmp_path: Path) -> None:
    file, picture = tmp_path / "plan.html", tmp_path / "plan.png"
    file.write_text(made[-1] + ACTS, encoding="utf-8")
    document = browser.opened(file, picture)
    seen = dict(re.findall(r'data-([a-z]+)="([^"]*)"', document.partition("<head>")[0]))
    assert (seen["ready"], seen["errors"]) == ("yes", "")
    assert int(seen["rows"]) >= 4
    assert int(seen["cells"]) == 27
    assert int(seen["colors"]) > 3
    assert int(seen["areas"]) > 3
    assert re.search(r" on compute: from .*, .*s$", seen["task"])
    assert (seen["fewer"], seen["again"]) == ("true", "true")
    assert "&lt;/script&gt;&lt;b&gt;" in document  # a name is text
    assert picture.stat().st_size > 10_000


class Deep(nn.Module):
    """Four layers, of which a microbatch keeps much more than their parameters have."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


@pytest.mark.deep
def test_more_samples_in_as_little_memory_take_more_microbatches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A number that is pinned is for the batch that was planned; others have as many as their budget asks for."""
    monkeypatch.setattr(whatif, "FACTORS", (1.0, 2.0))
    model, batch = Deep(), (torch.zeros(64, 16),)
    search = Search(pins={"microbatches": 2, "recompute": "none"}, recipe="ddp")
    program = program_of(model, batch)
    found = solve(program, {"a": 2}, slow_devices(), memory=1e9, search=search)
    budget = 1.1 * needed_by(found)
    cases = what_if(model, batch, found, budget=budget, search=search)
    splits = {(c.budget, c.samples): c.splits for c in cases if c.devices == 2}
    assert splits[budget, 64] == "2 microbatches"
    assert splits[budget, 128] in ("4 microbatches", "8 microbatches")
    assert splits[2 * budget, 128] in ("", "2 microbatches")


STAGED = {"stages": 2, "microbatches": 4, "schedule": "zb-h1"}


@pytest.fixture(scope="module")
def staged() -> tuple[Plan, str]:
    model, batch, search = Deep(), (torch.zeros(64, 16),), Search(pins=STAGED)
    found = find_plan(model, batch, cluster=slow_devices(), axes={"pp": 2, "a": 2}, memory=BUDGET, search=search)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(whatif, "FACTORS", (1.0,))
        page = report_page(model, batch, found.plan, compare_recipes(found), budget=BUDGET, search=search)
    return found.plan, page


@pytest.mark.slow
def test_the_data_of_stages_are_those_of_the_plan(staged: tuple[Plan, str]) -> None:
    found, page = staged
    data = data_of(page)
    assert [s["modules"] for s in data["stages"]] == [list(s.modules) for s in found.stages]
    assert [s["device"] for s in data["stages"]] == [0, 1]
    assert max(start + long for _, _, start, long, _ in data["timeline"]["tasks"]) == pytest.approx(
        found.predicted.step_seconds * 1e6
    )
    held = [d["peak"] for d in data["pipeline"]]
    assert max(held, key=lambda h: sum(h.values())) == pytest.approx(dict(found.predicted.peak_bytes))
    chart = data["memory"]
    highest = max(map(sum, zip(*chart["categories"].values(), strict=True)))
    assert highest == pytest.approx(sum(found.predicted.peak_bytes.values()), rel=0.1)
    assert {len(sizes) for sizes in chart["categories"].values()} == {len(chart["times"])}
    forward = sum(
        long for *_, long, kind in data["timeline"]["tasks"] if [*data["timeline"]["kinds"]][kind] == "forward"
    )
    assert forward == pytest.approx(4e6 * sum(s["forward"] for s in data["stages"]))
    lanes = data["timeline"]["streams"]
    assert lanes == ["device 0", "device 0 receives", "device 1", "device 1 receives"]
    assert len({c["devices"] for c in data["whatif"] if c["seconds"] is not None}) >= 1
    assert all("4 microbatches" in c["splits"] for c in data["whatif"] if c["chosen"])


@pytest.mark.skipif(bool(browser.missing()), reason=browser.missing())
def test_a_browser_draws_stages(staged: tuple[Plan, str], tmp_path: Path) -> None:
    file, picture = tmp_path / "plan.html", tmp_path / "plan.png"
    file.write_text(staged[-1] + ACTS, encoding="utf-8")
    document = browser.opened(file, picture)
    seen = dict(re.findall(r'data-([a-z]+)="([^"]*)"', document.partition("<head>")[0]))
    assert (seen["ready"], seen["errors"]) == ("yes", "")
    assert int(seen["colors"]) > 5  # forward, two parts of the backward, what is sent
    assert int(seen["areas"]) > 3
    assert re.search(r"of stage 0 on device 0: from .*, .*s$|before all microbatches on device 0", seen["task"])
    stages = document.partition('id="staged">')[2].partition("<h2>Timeline")[0]
    assert "layers.0" in stages and stages.count("<tr>") == 6
    assert picture.stat().st_size > 10_000


MODEL = """
import torch
def make():
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 4)), (torch.zeros(8, 8),), loss
def loss(output, batch):
    return output.square().mean()
"""


@pytest.fixture
def model_file(tmp_path: Path) -> Iterator[str]:
    file = tmp_path / "small_model.py"
    file.write_text(MODEL)
    yield f"{file}:make"


@pytest.mark.slow
def test_the_command(model_file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, page = tmp_path / "tiny.toml", tmp_path / "plan.html"
    replace(Cluster.preset("cpu"), name="tiny").save(cluster)
    monkeypatch.setattr(whatif, "FACTORS", (1.0,))
    arguments = ["plan", "--model", model_file, "--cluster", str(cluster), "--axes", "a=2", "--report", str(page)]
    result = CliRunner().invoke(cli.app, arguments)
    assert result.exit_code == 0, result.output
    data = data_of(page.read_text(encoding="utf-8"))
    assert data["title"] == "Sequential on tiny"
    assert len(data["whatif"]) == 1
    result = CliRunner().invoke(cli.app, [*arguments, "--stages", "2", "--microbatches", "2"])
    assert result.exit_code == 0, result.output
    assert len(data_of(page.read_text(encoding="utf-8"))["stages"]) == 2
    staged = [*arguments[:-4], "--axes", "pp=2", "--recipe", "megatron", "--report", str(page)]
    result = CliRunner().invoke(cli.app, staged)
    assert result.exit_code == WRONG_INPUT
    assert "--report is for plans that can be run" in result.output
