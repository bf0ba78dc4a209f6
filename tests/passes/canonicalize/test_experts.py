"""route_experts: which sorts of tokens by expert are left to each device, and which must stay as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from autopar.compiler import plan, program_of, rewrite
from autopar.costs.cluster import Cluster, Device, Link
from autopar.errors import InfeasibleError
from autopar.ir.ops import routing
from autopar.ir.ops.exchange import exchange_rows, own_block, own_rows
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.search.options import Search
from autopar.sharding.dims import analyze
from autopar.verify.verify import verify

HIDDEN, EXPERTS = 8, 4
AXES = {"a": 2, "b": 2}


def counted(ids: Tensor) -> Tensor:
    return torch.histc(ids.float(), bins=EXPERTS, min=0, max=EXPERTS - 1).cumsum(0, dtype=torch.int32)


def one_hot(ids: Tensor) -> Tensor:
    return F.one_hot(ids, EXPERTS).sum(0).cumsum(0).to(torch.int32)


def binned(ids: Tensor) -> Tensor:
    return torch.bincount(ids, minlength=EXPERTS).cumsum(0).int()


def argsorted(ids: Tensor) -> Tensor:
    return ids.argsort(stable=True)


def keyed(ids: Tensor) -> Tensor:
    """A key has the expert and the place of a pair, so that any sort is stable."""
    return (ids * len(ids) + torch.arange(len(ids))).argsort()


def unpacked(ids: Tensor) -> Tensor:
    """The place is read off the sorted keys."""
    return (ids * len(ids) + torch.arange(len(ids))).sort().values % len(ids)


def as_floats(ids: Tensor) -> Tensor:
    return ids.float().argsort(stable=True)


def from_the_last(ids: Tensor) -> Tensor:
    return (EXPERTS - 1 - ids).argsort(descending=True, stable=True)


def from_the_last_pair(ids: Tensor) -> Tensor:
    return (ids * len(ids) - torch.arange(len(ids))).argsort()


def reversed_experts(ids: Tensor) -> Tensor:
    """Rows are not in the order of the experts' weights."""
    return ids.argsort(descending=True, stable=True)


def few(ids: Tensor) -> Tensor:
    """An expert has no more than so many rows, which random tokens do not reach."""
    return torch.histc(ids.float(), EXPERTS, 0, EXPERTS - 1).clamp(max=30).cumsum(0, dtype=torch.int32)


def scattered(rows: Tensor, x: Tensor, order: Tensor, k: int) -> Tensor:
    return torch.zeros_like(x).scatter_add(0, (order // k)[:, None].expand(-1, x.shape[1]), rows)


def reduced(rows: Tensor, x: Tensor, order: Tensor, k: int) -> Tensor:
    return x.scatter_reduce(0, (order // k)[:, None].expand(-1, x.shape[1]), rows, "sum")


def added(rows: Tensor, x: Tensor, order: Tensor, k: int) -> Tensor:
    """To the tokens themselves."""
    return x.index_add(0, torch.div(order, k, rounding_mode="floor"), rows)


def inverted(rows: Tensor, x: Tensor, order: Tensor, k: int) -> Tensor:
    return rows[torch.argsort(order)].view(-1, k, x.shape[1]).sum(1)


def written(rows: Tensor, x: Tensor, order: Tensor, k: int) -> Tensor:
    pairs = torch.empty_like(rows)
    pairs[order] = rows
    return pairs.view(-1, k, x.shape[1]).sum(1)


def copied(rows: Tensor, x: Tensor, order: Tensor, k: int) -> Tensor:
    return torch.zeros_like(rows).index_copy(0, order, rows).view(-1, k, x.shape[1]).sum(1)


def summed(rows: Tensor, x: Tensor, order: Tensor, k: int) -> Tensor:
    """Rows are added up beside, in whatever order."""
    return scattered(rows, x, order, k) + rows.sum(0)


def chosen(rows: Tensor, x: Tensor, order: Tensor, k: int) -> Tensor:
    """Pairs are those of all tokens' first choices, then those of their second ones."""
    return torch.zeros_like(x).index_add(0, order % len(x), rows)


def chosen_inverse(rows: Tensor, x: Tensor, order: Tensor, k: int) -> Tensor:
    return rows[torch.argsort(order)].view(k, -1, x.shape[1]).sum(0)


def chosen_written(rows: Tensor, x: Tensor, order: Tensor, k: int) -> Tensor:
    pairs = torch.empty_like(rows)
    pairs[order] = rows
    return x.index_add(0, torch.arange(len(x)).repeat(k), pairs)


def capped(rows: Tensor, x: Tensor, order: Tensor, k: int) -> Tensor:
    """Late rows are dropped: which are late, the order of all tokens says."""
    late = torch.arange(len(rows)) % 3 == 2
    return scattered(rows.masked_fill(late[:, None], 0.0), x, order, k)


def running(rows: Tensor, x: Tensor, order: Tensor, k: int) -> Tensor:
    return scattered(rows.cumsum(0), x, order, k)


def mixed(rows: Tensor, x: Tensor, order: Tensor, k: int) -> Tensor:
    """Sorted rows beside tokens that are not."""
    return scattered(rows * x.repeat_interleave(k, 0), x, order, k)


def overwritten(rows: Tensor, x: Tensor, order: Tensor, k: int) -> Tensor:
    """A token has the row that is written last, not the sum of its rows."""
    out = torch.zeros_like(x)
    out[order // k] = rows.detach()
    return scattered(rows, x, order, k) + out


def of_one_column(rows: Tensor, x: Tensor, order: Tensor, k: int) -> Tensor:
    first = torch.zeros_like(x).scatter_add(0, (order // k)[:, None], rows.detach())
    return scattered(rows, x, order, k) + first


def bounded(rows: Tensor, x: Tensor, order: Tensor, k: int) -> Tensor:
    """Rows of late tokens go to another one."""
    return torch.zeros_like(x).index_add(0, (order // k).clamp(max=9000 if len(x) > 9000 else 5), rows)


def handed(rows: Tensor, x: Tensor, order: Tensor, k: int) -> Tensor:
    """The caller sees the order."""
    return scattered(rows, x, order, k), rows  # type: ignore[return-value]


def looked_up(rows: Tensor, x: Tensor, order: Tensor, k: int) -> Tensor:
    """The order is read as numbers."""
    return scattered(rows, x, order, k) + order[0]


Collect = Callable[[Tensor, Tensor, Tensor, int], Tensor]


class Layer(nn.Module):
    """A mixture of experts by grouped products, as training loops write it."""

    def __init__(
        self,
        collect: Collect,
        ends: Callable[[Tensor], Tensor] = counted,
        k: int = 2,
        bias: str = "",
        sizes: tuple[int, int, int] = (HIDDEN, EXPERTS, 4),
        by_choice: bool = False,
        sort: Callable[[Tensor], Tensor] = argsorted,
        none: bool = False,
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        hidden, experts, inner = sizes
        self.gate = nn.Linear(hidden, experts + none, bias=False)
        self.up = nn.Parameter(torch.randn(experts, hidden, inner) / 3)
        self.down = nn.Parameter(torch.randn(experts, inner, hidden) / 2)
        self.bias = nn.Parameter(torch.randn(experts, inner)) if bias else None
        self.load = nn.Buffer(torch.zeros(experts))
        self.collect, self.ends, self.k, self.biased, self.by_choice = collect, ends, k, bias, by_choice
        self.sort = sort

    def forward(self, x: Tensor) -> Tensor:
        tokens, experts = x.flatten(0, 1), len(self.load)
        scores, ids = self.gate(tokens).softmax(-1).topk(self.k, -1)
        if self.by_choice:
            scores, ids = scores.T, ids.T
        flat = ids.flatten()
        order = self.sort(flat)
        ends = self.ends(flat)
        with torch.no_grad():
            self.load += torch.histc(flat.float(), bins=experts, min=0, max=experts - 1)
        token = order % len(tokens) if self.by_choice else order // self.k
        rows = torch.gather(tokens, 0, token[:, None].expand(-1, x.shape[-1]))
        h = grouped(rows, self.up, ends)
        if self.bias is not None:
            # What rows of an expert are, numbers of rows say, too.
            counts = torch.diff(ends, prepend=ends.new_zeros(1))
            h = h + (
                self.bias[flat[order]]
                if self.biased == "looked up"
                else self.bias.repeat_interleave(counts, 0, output_size=len(flat))
            )
        rows = grouped(F.silu(h), self.down, ends) * scores.flatten()[order][:, None]
        found: Any = self.collect(rows, tokens, order, self.k)
        if isinstance(found, tuple):
            return found[0].square().mean(), *(t.detach() for t in found[1:])  # type: ignore[return-value]
        loss: Tensor = found.square().mean()
        return loss


def grouped(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    # Torch's own takes no float64 on CPUs.
    import transformers.integrations.moe  # noqa: F401

    return torch.ops.transformers.grouped_mm_fallback(rows, weight, ends)


def batch(rows: int = 4) -> tuple[Tensor]:
    return (torch.randn(rows, 4, HIDDEN, generator=torch.Generator().manual_seed(1)),)


def targets(program: Program) -> set[Any]:
    return {n.target for n in program.graph.graph.nodes}


OFTEN = ("scatter_add", "bias", "top 1", "keys, places", "of none")
"""The others go the same way: `test_tokens_are_sorted_where_they_are` verifies each under one plan."""

ROUTED = {
    "scatter_add": lambda: Layer(scattered),
    "index_add": lambda: Layer(added, one_hot),
    "scatter_reduce": lambda: Layer(reduced),
    "argsort": lambda: Layer(inverted),
    "written": lambda: Layer(written, one_hot),
    "top 1": lambda: Layer(inverted, k=1),
    "bias": lambda: Layer(scattered, bias="looked up"),
    "repeated": lambda: Layer(copied, binned, bias="repeated"),
    "sum": lambda: Layer(summed),
    "choices": lambda: Layer(chosen, by_choice=True),
    "choices, inverse": lambda: Layer(chosen_inverse, binned, bias="repeated", by_choice=True),
    "choices, written": lambda: Layer(chosen_written, bias="looked up", by_choice=True),
    "keys": lambda: Layer(scattered, sort=keyed),
    "keys, places": lambda: Layer(inverted, sort=unpacked, bias="looked up"),
    "floats": lambda: Layer(scattered, sort=as_floats),
    "descending": lambda: Layer(inverted, sort=from_the_last),
    "keys, choices": lambda: Layer(chosen_inverse, sort=from_the_last_pair, by_choice=True),
    "of none": lambda: Layer(scattered, none=True),
}
KEPT = {
    "dropped": lambda: Layer(capped),
    "cumsum": lambda: Layer(running),
    "mixed": lambda: Layer(mixed),
    "read": lambda: Layer(looked_up),
    "overwritten": lambda: Layer(overwritten),
    "one column": lambda: Layer(of_one_column),
    "bounded": lambda: Layer(bounded),
    "handed": lambda: Layer(handed),
    "counted in two ways": lambda: Layer(scattered, by_choice=True),
    "few rows": lambda: Layer(scattered, few),
    "reversed": lambda: Layer(scattered, sort=reversed_experts),
}


@pytest.mark.some(2)
@pytest.mark.parametrize("name", ROUTED)
def test_tokens_are_sorted_where_they_are(name: str) -> None:
    model = ROUTED[name]()
    program = program_of(model, batch())
    assert {routing.sort_by_expert, routing.route, routing.collect, routing.group_ends} <= targets(program)
    found = plan(model, batch(), cluster="h100", axes=AXES, search=Search(recipe="ddp"))
    report = verify(model, batch(), AXES, plan=found)
    assert report.max_error < 1e-12
    # Each device has its own tokens from beginning to end.
    rows = [n.meta["val"].shape[0] for n in report.program.graph.graph.nodes if n.target is routing.route]
    assert set(rows) == {4 * 4 * model.k // 4}


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("name", "seed"),
    [
        *((n, 1) for n in OFTEN),
        *(pytest.param(n, 1, marks=pytest.mark.deep) for n in ROUTED if n not in OFTEN),
        *(pytest.param(n, 0, marks=pytest.mark.deep) for n in ROUTED),
    ],
)
def test_random_plans(name: str, seed: int) -> None:
    report = verify(ROUTED[name](), batch(), AXES, plan="random", seed=seed, random_strides=bool(seed))
    assert report.max_error < 1e-12


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("axes", "options", "exchanges"),
    [
        ({"a": 2, "b": 2}, {"recipe": "expert"}, 5),
        ({"a": 2, "b": 2}, {"roles": {"a": "expert", "b": "expert"}}, 10),
        ({"a": 1, "b": 4}, {"roles": {"a": "expert", "b": "expert"}}, 5),
        pytest.param(
            {"a": 2, "b": 2, "c": 2}, {"roles": {"a": "shard", "b": "expert", "c": "data"}}, 5, marks=pytest.mark.deep
        ),
    ],
)
def test_tokens_go_to_their_experts(axes: dict[str, int], options: dict[str, Any], exchanges: int) -> None:
    """Rows and their experts forth, rows back, and the same for gradients."""
    given = batch(8)
    found = plan(Layer(scattered, bias="looked up"), given, cluster="h100", axes=axes, search=Search(**options))
    of_experts = [a for a, role in options.get("roles", {"b": "expert"}).items() if role == "expert"]
    placed = dict(zip(axes, found.parameters["up"], strict=True))
    assert all(str(placed[a]) == "S(0.0)" for a in of_experts)
    report = verify(Layer(scattered, bias="looked up"), given, axes, plan=found)
    assert report.max_error < 1e-12
    assert [n.target for n in report.program.graph.graph.nodes].count(exchange_rows) == exchanges


FAR = Cluster(
    "far",
    Device("slow", {"float64": 1e5, "float32": 1e5}, 1e11, bandwidth=1e9, launch=1e-7),
    (Link("wire", bandwidth=1e7, latency=1e-4),),
)
"""Messages take as long as what few tokens compute."""


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("axes", "placed", "taken", "skewed"),
    [
        ({"a": 4}, ("S(0)",), 5, True),
        ({"a": 2, "b": 2}, ("R", "S(0)"), 5, False),
        ({"a": 2, "b": 2}, ("S(0)", "S(0)"), 10, True),
        pytest.param({"a": 2, "b": 2}, ("S(0)", "S(0)"), 10, False, marks=pytest.mark.deep),
        pytest.param({"a": 2, "b": 2, "c": 2}, ("S(0)", "R", "S(0)"), 10, True, marks=pytest.mark.deep),
    ],
)
def test_tokens_stay(axes: dict[str, int], placed: tuple[str, ...], taken: int, skewed: bool) -> None:
    """Rows, experts and the gate's factors of own experts, and two gradients; nothing is sent but sums of tokens."""
    model = Layer(scattered, bias="looked up").double()
    if skewed:
        with torch.no_grad():
            model.gate.weight[:1] *= 30
    given = (batch(1)[0].double(),)
    found = plan(model, given, cluster=FAR, axes=axes, search=Search(pins={"up": placed, "down": placed}))
    report = verify(model, given, axes, plan=found)
    assert report.max_error < 1e-12
    called = [n.target for n in report.program.graph.graph.nodes]
    assert called.count(own_rows) == taken
    assert called.count(own_block) == sum(p != "R" for p in placed)  # the host waits once an axis, backward included
    assert exchange_rows not in called


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("seed", "axes"),
    [
        (1000, {"a": 2, "b": 2}),
        (1001, {"a": 2, "b": 2, "c": 2}),
        *(pytest.param(s, {"a": 2, "b": 2}, marks=pytest.mark.deep) for s in range(40)),
        *(pytest.param(s, {"a": 2, "b": 2, "c": 2}, marks=pytest.mark.deep) for s in range(40)),
    ],
)
def test_rows_by_expert_in_random_plans(axes: dict[str, int], seed: int) -> None:
    """In microbatches as well, and with sorts that are made again for some of what they give; few experts have rows."""
    model = Layer(added, one_hot, bias=bool(seed % 2)).double()
    with torch.no_grad():
        model.gate.weight[: seed % 3 + 1] *= 30
    pins = {"recompute": "search", "microbatches": 1 + seed % 2}
    given = (batch(16)[0].double(),)
    found = plan(model, given, cluster="h100", axes=axes, search=Search(recipe="random", seed=seed, pins=pins))
    report = verify(model, given, axes, plan=found)
    assert report.max_error < 1e-10
    assert exchange_rows in {n.target for n in report.program.graph.graph.nodes}


def many(ids: Tensor) -> Tensor:
    return torch.histc(ids.float(), bins=512, min=0, max=511).cumsum(0, dtype=torch.int32)


@pytest.mark.some(1)
@pytest.mark.parametrize(("tokens", "way"), [(64, "="), (4096, ">")])
def test_few_tokens_stay_and_many_travel(tokens: int, way: str) -> None:
    """512 experts of 512 features, ten of them a token, on the eight GPUs of a node: as Qwen3-Next has."""
    with torch.device("meta"):
        model = Layer(scattered, many, k=10, sizes=(2048, 512, 512)).bfloat16()
        given = (torch.empty(8, tokens, 2048, dtype=torch.bfloat16),)
    found = plan(model, given, cluster="h100", axes={"gpu": 8}, memory=1e12, search=Search(pins={"microbatches": 1}))
    names = {name for names in found.choices.values() for name in names}
    assert {name[-1] for name in names} & {"=", ">"} == {way}
    assert ("all_to_all" in found.predicted.collectives["gpu"]) == (way == ">")
    assert str(found.parameters["up"][0]) == "S(0.0)"


class Capped(nn.Module):
    """Experts have so many places for tokens of a group, which one-hot tensors send there (GShard's Algorithm 1)."""

    def __init__(self, capacity: int, experts: int = EXPERTS) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate = nn.Linear(HIDDEN, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, HIDDEN, 4) / 3)
        self.down = nn.Parameter(torch.randn(experts, 4, HIDDEN) / 2)
        self.capacity, self.experts = capacity, experts

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(x).softmax(-1)
        top, ids = scores.topk(2, -1)
        chosen = F.one_hot(ids, self.experts).to(x.dtype)
        # First choices have their places before all second ones.
        pairs = chosen.transpose(1, 2).flatten(1, 2)
        before = pairs.cumsum(1) - pairs
        kept = pairs * (before < self.capacity)
        places = F.one_hot((before * kept).sum(-1).long(), max(self.capacity, 1)).to(x.dtype)
        sent = (kept[..., None] * places[..., None, :]).unflatten(1, (2, -1))
        rows = torch.einsum("gksec,gsm->egcm", sent, x)
        made = torch.einsum("egcn,enm->egcm", F.silu(torch.einsum("egcm,emn->egcn", rows, self.up)), self.down)
        back = torch.einsum("gksec,gsk,egcm->gsm", sent, top, made)
        balance = (chosen[:, :, 0].mean(1) * scores.mean(1)).sum()
        return (x + back).square().mean() + 0.01 * balance


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("capacity", "options"),
    [(3, {"pins": {"up": ("R", "S(0)"), "down": ("R", "S(0)")}}), (0, {"recipe": "random", "seed": 1})]
    + [pytest.param(2, {"recipe": "random", "seed": s}, marks=pytest.mark.deep) for s in range(10)],
)
def test_capacity(capacity: int, options: dict[str, Any]) -> None:
    """Late tokens are dropped as on one device, all of them where experts have no place."""
    model, given = Capped(capacity).double(), (batch(4)[0].double(),)
    found = plan(model, given, cluster="h100", axes=AXES, search=Search(**options))
    report = verify(model, given, AXES, plan=found)
    assert report.max_error < 1e-12
    if "pins" in options:
        assert str(found.parameters["up"][1]) == "S(0.0)"


@pytest.mark.parametrize("skew", [False, pytest.param(True, marks=pytest.mark.deep)])
def test_one_sequence_is_split_by_position(skew: bool) -> None:
    """One sample has nothing else to split outside of the experts; ``skew``: all tokens have the same two experts."""
    model, given = Layer(scattered).double(), (batch(1)[0].double(),)
    if skew:
        model.gate.register_forward_hook(lambda gate, x, scores: scores + torch.tensor([30.0, 20.0, 0.0, 0.0]))
    search = Search(roles={"a": "context", "b": "expert"}, cache=False)
    found = plan(model, given, cluster="h100", axes=AXES, search=search)
    assert verify(model, given, AXES, plan=found).max_error < 1e-12
    assert [str(p) for p in found.batch["0"]] == ["S(1.0)"] * 2
    assert str(found.parameters["up"][1]) == "S(0.0)" and found.predicted.collectives["b"]["all_to_all"] >= 3
    with pytest.raises(InfeasibleError, match=r"no tensor of the batch .* or role 'context', which splits the seq"):
        plan(model, given, cluster="h100", axes=AXES, search=Search(recipe="fsdp"))


class Filled(Layer):
    """Pairs of small scores are of a number that is no expert's."""

    def __init__(self, fill: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__(scattered)
        self.fill = fill

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        scores, ids = self.gate(tokens).softmax(-1).topk(2, -1)
        dropped = scores < 0.26
        flat = self.fill(ids, dropped).flatten()
        order, ends = flat.argsort(stable=True), counted(flat)
        rows = grouped(F.silu(grouped(tokens[order // 2], self.up, ends)), self.down, ends)
        rows = rows * (scores * ~dropped).flatten()[order][:, None]
        return scattered(rows, tokens, order, 2).square().mean()


FILLS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "second": lambda ids, dropped: torch.where(dropped, EXPERTS, ids),
    "third": lambda ids, dropped: torch.where(~dropped, ids, EXPERTS),
    "added": lambda ids, dropped: ids + dropped * (EXPERTS - ids),
    "largest": lambda ids, dropped: torch.maximum(ids, dropped * EXPERTS),
    "before": lambda ids, dropped: torch.where(dropped, -1, ids),
}


@pytest.mark.some(2)
@pytest.mark.slow
@pytest.mark.parametrize("name", FILLS)
def test_pairs_of_no_expert(name: str) -> None:
    """However their number is written; rows of one before the first expert's are his, where ends do not count them."""
    model, given = Filled(FILLS[name]).double(), (batch(8)[0].double(),)
    assert (routing.sort_by_expert in targets(program_of(model, given))) == (name != "before")
    assert verify(model, given, AXES, plan="random", seed=1).max_error < 1e-12
    with pytest.raises(InfeasibleError, match="each pair of one of these experts"):
        plan(model, given, cluster="h100", axes={"a": 2}, search=Search(recipe="expert"))


def test_experts_that_cannot_be_split() -> None:
    with pytest.raises(InfeasibleError, match=r"4 experts do not divide along axis a=8"):
        plan(Layer(scattered), batch(8), cluster="h100", axes={"a": 8}, search=Search(recipe="expert"))
    with pytest.raises(InfeasibleError, match=r"no experts to split along axis a=2: .*, or take role 'shard'"):
        plan(Layer(capped), batch(8), cluster="h100", axes={"a": 2}, search=Search(recipe="expert"))
    with pytest.raises(InfeasibleError, match=r"each pair of one of these experts"):
        plan(ROUTED["of none"](), batch(8), cluster="h100", axes={"a": 2}, search=Search(recipe="expert"))
    with pytest.raises(ValueError, match=r"the tokens of 3 experts, and a mixture of the model has 4"):
        plan(Layer(scattered), batch(8), cluster="h100", axes={"a": 2}, search=Search(imbalance=[1, 2, 3]))


@pytest.mark.slow
def test_imbalance() -> None:
    """Experts that get more tokens take longer and hold more; a factor is the same as the tokens that give it."""
    given = (torch.empty(512, 64, HIDDEN, device="meta"),)
    model = Layer(scattered).to("meta")
    options = [1.0, 1.5, [3, 3, 1, 1], [6, 2, 2, 2]]
    plans = [plan(model, given, cluster="h100", axes={"a": 2}, search=Search(recipe="expert", imbalance=x))
             for x in options]  # fmt: skip
    seconds = [p.predicted.step_seconds for p in plans]
    peaks = [sum(p.predicted.peak_bytes.values()) for p in plans]
    assert seconds[0] < seconds[3] < seconds[1] == seconds[2]
    assert peaks[0] < peaks[3] < peaks[1] == peaks[2]
    assert Plan.from_dict(plans[2].to_dict()).expert_load == (3.0, 3.0, 1.0, 1.0)
    # Products, rows in memory and messages are of the device that has most.
    emitted = rewrite(program_of(model, given), plans[1])
    sizes = {int(n.meta["val"].shape[0]) for n in emitted.graph.graph.nodes if n.target is exchange_rows}
    assert sizes == {512 * 64 * 2 // 2, 512 * 64 * 2 // 2 * 3 // 2}


@pytest.mark.parametrize("name", KEPT)
def test_an_order_that_is_read_stays(name: str) -> None:
    model = KEPT[name]()
    assert routing.sort_by_expert not in targets(program_of(model, batch()))


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == "mixed" else pytest.mark.deep) for n in KEPT])
def test_random_plans_of_an_order_that_is_read(name: str) -> None:
    assert verify(KEPT[name](), batch(), AXES, plan="random").max_error < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, pytest.param(0, marks=pytest.mark.deep)])
def test_one_layer_of_two(seed: int) -> None:
    """A layer whose order is read keeps its own sort, and only that; the two, which are numbered, are not alike."""
    found = [n.target for n in program_of(Two(), batch()).graph.graph.nodes]
    assert found.count(routing.sort_by_expert) == 1
    for chosen in ("random", None):
        assert verify(Two(), batch(), AXES, plan=chosen, seed=seed).max_error < 1e-12


class Two(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(scattered), Layer(running)])

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.layers[0](x) + self.layers[1](x)
        return loss


def test_microbatches() -> None:
    """Tokens of a microbatch do not see those of the next: without the rewriting a sort would forbid it."""
    report = verify(Layer(scattered), batch(8), AXES, plan="random", microbatches=2)
    assert report.plan is not None and report.plan.microbatches == 2
    assert report.max_error < 1e-12


def test_what_is_in_an_order_is_not_cut_otherwise() -> None:
    dims = analyze(program_of(Layer(scattered, bias="looked up"), batch()))
    routed = {n.name: t.routed for (n, _), t in dims.types.items() if t.routed is not None}
    assert set(routed.values()) == {(0,), ()}  # rows, and counts
    by_target = {n.target: t.routed for (n, _), t in dims.types.items()}
    assert by_target[routing.collect] is None
    assert by_target[routing.add_by_expert] is None


@pytest.mark.some(5)
@pytest.mark.parametrize("name", [*ROUTED, *KEPT])
def test_of_many_tokens_fewer_are_looked_at(name: str) -> None:
    """Three hundred million pairs: nothing of that size is made."""
    model = (ROUTED | KEPT)[name]().to("meta")
    program = program_of(model, (torch.empty(2**14, 2**13, HIDDEN, device="meta"),))
    assert (routing.sort_by_expert in targets(program)) == (name in ROUTED)


@pytest.mark.parametrize("tokens", [1, 2])
def test_few_tokens(tokens: int) -> None:
    """An order of two pairs is its own inverse, and one of one pair anything."""
    x = (torch.randn(1, tokens, HIDDEN),)
    assert verify(Layer(inverted, k=1), x, {"a": 2}, plan="random").max_error < 1e-12


@pytest.mark.slow
def test_more_layers_than_python_has_frames() -> None:
    """Experts of the last one depend on all of them."""

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = ROUTED["keys"]()

        def forward(self, x: Tensor) -> Any:
            for _ in range(1100):
                x = x.tanh()
            return self.layer(x)

    assert routing.sort_by_expert in targets(program_of(Deep(), batch(8)))
