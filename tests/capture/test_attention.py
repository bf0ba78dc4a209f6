"""Masks that are known and heads that are repeated become arguments of attention."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional
from torch.nn.functional import scaled_dot_product_attention

import autopar
from autopar.capture import capture
from autopar.capture.attention import hidden
from autopar.compiler import program_of, rewrite, solve
from autopar.search.options import Search
from autopar.verify.verify import compare, global_values, verify
from tests import models
from tests.crossed import crossed

ROWS, TOKENS, HEADS, HEAD = 4, 8, 4, 8
FORWARD = torch.ops.autopar.attention.default
BOUND = 1e-10

Mask = Callable[[torch.Tensor, nn.Module], torch.Tensor | None]
RepeatedLayers = Callable[[torch.Tensor], torch.Tensor]


class Attention(nn.Module):
    """Attention with a mask of one's own; ``x`` is [row, token, hidden]."""

    def __init__(self, mask: Mask, repeat: RepeatedLayers = lambda x: x.transpose(1, 2), heads: int = HEADS) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mask, self.repeat, self.heads = mask, repeat, heads
        self.q, self.k, self.v = (nn.Linear(HEADS * HEAD, n * HEAD) for n in (HEADS, heads, heads))
        self.register_buffer("own", torch.ones(TOKENS, TOKENS).tril().bool())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.q(x).unflatten(-1, (HEADS, HEAD)).transpose(1, 2)
        k, v = (self.repeat(f(x).unflatten(-1, (self.heads, HEAD))) for f in (self.k, self.v))
        return scaled_dot_product_attention(q, k, v, attn_mask=self.mask(x, self)).square().mean()


def batch() -> dict[str, torch.Tensor]:
    return {"x": torch.randn(ROWS, TOKENS, HEADS * HEAD, generator=torch.Generator().manual_seed(1))}


def kernel(model: nn.Module) -> fx.Node:
    program = capture(model, batch())
    return next(n for n in program.graph.graph.nodes if n.target is FORWARD)


def positions() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(TOKENS)[:, None], torch.arange(TOKENS)[None]


def later() -> torch.Tensor:
    at, of = positions()
    return at >= of


def additive(value: float) -> torch.Tensor:
    return torch.zeros(TOKENS, TOKENS).masked_fill(~later(), value)


def of_each_row() -> torch.Tensor:
    """As Hugging Face finds out whether rows hold several sequences: of all rows, by their positions."""
    at = torch.arange(TOKENS).expand(ROWS, -1)
    sequence = (torch.diff(at, prepend=at[:, :1] - 1, dim=-1) != 1).cumsum(-1)
    row = torch.arange(ROWS)[:, None, None, None]
    same = sequence[row, positions()[0]] == sequence[row, positions()[1]]
    return same & (positions()[0] >= positions()[1])


CAUSAL: dict[str, Mask] = {
    "bool": lambda x, m: later(),
    "added": lambda x, m: additive(-torch.inf).to(x),
    "least": lambda x, m: additive(torch.finfo(torch.float32).min).to(x),
    "by rows": lambda x, m: of_each_row(),
    "tril": lambda x, m: torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril().expand(ROWS, 1, -1, -1),
}


def written(mask: torch.Tensor, view: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """A mask that is changed, perhaps through a view, after what made it."""
    view(mask).fill_(True)
    return mask


def written_without_gradients(mask: torch.Tensor) -> torch.Tensor:
    """The same in a graph within the graph."""
    with torch.no_grad():
        mask[:, 1:].logical_or_(torch.ones(1, dtype=torch.bool))
    return mask


OTHERS: dict[str, Mask] = {
    "written in part": lambda x, m: written(later(), lambda mask: mask[2]),
    "written through views": lambda x, m: written(later(), lambda mask: mask.reshape(-1).unflatten(0, (2, -1))[1]),
    "a window": lambda x, m: later() & (positions()[0] - positions()[1] < 3),
    "a bias": lambda x, m: additive(-torch.inf).to(x) + 0.5,
    "not quite hidden": lambda x, m: additive(-1e4).to(x),
    "the earlier ones": lambda x, m: ~later() | torch.eye(TOKENS).bool(),
    "of the batch": lambda x, m: (x[:, None, :1, :TOKENS] < 9) & later(),
    "a buffer": lambda x, m: m.own,
    "by chance": lambda x, m: (torch.rand(TOKENS, TOKENS) < 2) & later(),
    "by row": lambda x, m: (torch.arange(ROWS) < 2)[:, None, None, None] | later(),
}


@pytest.mark.parametrize("name", CAUSAL)
def test_a_causal_mask_is_told(name: str) -> None:
    node = kernel(Attention(CAUSAL[name]))
    assert node.args[3:] == (None, None, 0.0, True, None)


@pytest.mark.parametrize(
    "mask",
    [
        lambda x, m: torch.ones(ROWS, 1, 1, TOKENS, dtype=torch.bool),
        lambda x, m: written(later(), lambda mask: mask),
        lambda x, m: written_without_gradients(later()),
    ],
)
def test_a_mask_that_hides_nothing_goes(mask: Mask) -> None:
    assert kernel(Attention(mask)).args[3:] == (None, None, 0.0, False, None)


@pytest.mark.some(4)
@pytest.mark.parametrize("name", OTHERS)
def test_other_masks_stay(name: str) -> None:
    node = kernel(Attention(OTHERS[name]))
    assert isinstance(node.args[3], fx.Node)
    assert node.args[4:] == (None, 0.0, False, None)


@pytest.mark.some(2)
@pytest.mark.parametrize("name", [*CAUSAL, "none"])
def test_long_masks_are_known_by_their_functions(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Masks that are never made, in part or as a whole."""
    monkeypatch.setattr("autopar.capture.attention.LARGEST", TOKENS**2 - 1)
    known = {**CAUSAL, "none": lambda x, m: positions()[0] + positions()[1] >= 0}
    assert isinstance(kernel(Attention(known[name])).args[3], fx.Node) or name == "tril"
    graph = program_of(Attention(known[name]), batch()).graph.graph
    (node,) = (n for n in graph.nodes if n.target is FORWARD)
    assert node.args[3:] == (None, None, 0.0, name != "none", None)


def test_what_a_mask_hides() -> None:
    square = torch.ones(3, 3, dtype=torch.bool)
    assert hidden(square, 3, 3) == hidden(torch.zeros(1), 3, 3) == "none"
    assert hidden(square.tril(), 3, 3) == "later"
    assert hidden(torch.ones(2, 3, dtype=torch.bool).tril(), 2, 3) is None  # which queries these are is not said
    assert hidden(torch.stack([square, square.tril()])[:, None], 3, 3) is None
    assert hidden(torch.stack([square.tril()] * 2)[:, None], 3, 3) == "later"


def expanded(x: torch.Tensor) -> torch.Tensor:
    rows, tokens, heads, head = x.shape
    return x.transpose(1, 2)[:, :, None].expand(rows, heads, 2, tokens, head).reshape(rows, 2 * heads, tokens, head)


def expanded_before(x: torch.Tensor) -> torch.Tensor:
    rows, tokens, heads, head = x.shape
    return x[:, :, :, None].expand(rows, tokens, heads, 2, head).reshape(rows, tokens, 2 * heads, head).transpose(1, 2)


def interleaved(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2).repeat_interleave(2, dim=1)


def tiled(x: torch.Tensor) -> torch.Tensor:
    """Head 0, 1, 0, 1, which is not what attention does of its own."""
    return torch.cat([x.transpose(1, 2)] * 2, dim=1)


def along_tokens(x: torch.Tensor) -> torch.Tensor:
    rows, tokens, heads, head = x.shape
    return x.transpose(1, 2)[:, :, None].expand(rows, heads, 2, tokens, head).reshape(rows, heads, 2 * tokens, head)


@pytest.mark.parametrize("repeat", [expanded, expanded_before, interleaved])
def test_heads_are_not_repeated(repeat: RepeatedLayers) -> None:
    node = kernel(Attention(CAUSAL["bool"], repeat, heads=2))
    assert [n.meta["val"].shape[1] for n in node.args[:3]] == [4, 2, 2]  # type: ignore[union-attr]


def test_other_repetitions_stay() -> None:
    assert kernel(Attention(CAUSAL["bool"], tiled, heads=2)).args[1].meta["val"].shape[1] == 4  # type: ignore[union-attr]
    node = kernel(Attention(lambda x, m: None, along_tokens, heads=4))
    assert node.args[1].meta["val"].shape == (ROWS, 4, 2 * TOKENS, HEAD)  # type: ignore[union-attr]


def test_heads_are_not_repeated_beside_a_mask() -> None:
    assert kernel(Attention(OTHERS["a window"], expanded, heads=2)).args[1].meta["val"].shape[1] == 2  # type: ignore[union-attr]


def test_a_llama_has_neither() -> None:
    model, tokens = models.llama()
    program = capture(model, tokens)
    nodes = [n for n in program.graph.graph.nodes if n.target is FORWARD]
    assert nodes
    for node in nodes:
        assert node.args[3:7] == (None, None, 0.0, True)
        assert node.args[1].meta["val"].shape[1] == model.config.num_key_value_heads  # type: ignore[union-attr]


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("mask", "repeat"),
    crossed([*CAUSAL, *(n for n in OTHERS if n != "by chance")], [expanded, expanded_before, interleaved, tiled]),
)
def test_the_graph_computes_what_the_model_does(mask: str, repeat: RepeatedLayers) -> None:
    model = Attention({**CAUSAL, **OTHERS}[mask], repeat, heads=2).double()
    report = verify(model, {"x": batch()["x"].double()}, {"a": 1})
    assert max(report.max_error, report.capture_error) < BOUND


@pytest.mark.slow
def test_what_torch_transforms_is_torchs() -> None:
    """Its operators have rules for batches of `vmap` and for dual numbers; ours has none."""

    class Mapped(Attention):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = (f(x).unflatten(-1, (HEADS, HEAD)).transpose(1, 2) for f in (self.q, self.k, self.v))
            return torch.func.vmap(scaled_dot_product_attention)(q[:, None], k[:, None], v[:, None]).square().mean()

    model = Mapped(CAUSAL["bool"]).double()
    report = verify(model, {"x": batch()["x"].double()}, {"a": 2}, plan="random")
    assert max(report.max_error, report.capture_error) < BOUND


@pytest.mark.slow
def test_dims_and_heads_of_every_kind() -> None:
    """Of one head without a dim for it, of two leading dims, with a mask of one row, and with dropout."""

    class Kinds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.f, self.bias = nn.Linear(8, 24), nn.Parameter(torch.randn(4, 6, 1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.f(x).chunk(3, -1)
            of_heads = [t.unflatten(-1, (2, 4)).transpose(1, 2) for t in (q, k, v)]
            found = [
                scaled_dot_product_attention(q, k, v, is_causal=True),
                scaled_dot_product_attention(q, k, v, torch.ones(6).cumsum(0) < 4),
                scaled_dot_product_attention(q, k, v, self.bias.expand(-1, -1, 6), dropout_p=0.2),
                scaled_dot_product_attention(*(t[None] for t in of_heads)).flatten(0, 1).transpose(1, 2).flatten(2),
                scaled_dot_product_attention(*of_heads, self.bias[:1], 0.3, scale=2.0).transpose(1, 2).flatten(2),
            ]
            return functional.dropout(torch.stack(found), 0.1).square().mean()

    model, x = Kinds().double(), torch.randn(4, 6, 8, dtype=torch.float64)
    for axes in ({"a": 1}, {"a": 2}):
        report = verify(model, {"x": x}, axes, plan="random")
        assert max(report.max_error, report.capture_error) < BOUND
    targets = [n.target for n in report.program.graph.graph.nodes]
    masked = torch.ops.autopar.attention_masked.default
    assert targets.count(FORWARD) + targets.count(masked) == 4  # of five dims torch's own parts


@pytest.mark.slow
def test_torchs_own_module_is_one_operator_with_dropout() -> None:
    """On every device: within its function, which is Python's, torch would take the parts on a CPU."""

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.attention = nn.MultiheadAttention(8, 2, dropout=0.2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.attention(x, x, x, need_weights=False)[0].square().sum()

    x = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(0))
    targets = [str(n.target) for n in program_of(Own(), (x,)).graph.graph.nodes]
    assert targets.count("autopar.attention.default") == 1
    assert not [t for t in targets if "softmax" in t]
    report = verify(Own().double(), (x.double(),), {"a": 2}, plan="random")
    assert max(report.max_error, report.capture_error) < BOUND


def test_autocast() -> None:
    """Attention computes in the lower precision, as torch's does."""

    class Lower(Attention):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return super().forward(x)

    assert kernel(Lower(CAUSAL["bool"])).meta["val"][0].dtype == torch.bfloat16


@pytest.mark.slow
def test_queries_are_split() -> None:
    """Random plans of causal attention, some of which split queries: these need a mask of their own."""
    model, tokens = Attention(CAUSAL["bool"], expanded, heads=2), batch()
    program = program_of(model, tokens)
    split = set()
    for seed in range(60):
        plan = solve(program, {"a": 2, "b": 2}, "cpu", search=Search(recipe="random", seed=seed))
        local = rewrite(program, plan)
        assert compare(program, local, plan, global_values(program, model, tokens), torch.float64).max_error < BOUND
        node, *others = (n for n in local.graph.graph.nodes if n.target is FORWARD)
        if others:  # keys go round in a ring, and none is hidden
            continue
        whole = node.args[0].meta["val"].shape[2] == TOKENS  # type: ignore[union-attr]
        assert whole == (node.args[3] is None) == node.args[6]
        split.add(not whole)
        if len(split) == 2:
            break
    assert split == {True, False}


class WritesMask(nn.Module):
    """Attention under a mask that is built by writing to it; its first query sees nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        """Attention of two heads."""
        heads = self.linear(x).reshape(2, 6, 2, 4).transpose(1, 2)
        mask = torch.ones(6, 6, dtype=torch.bool).tril()
        mask[0] = False
        return scaled_dot_product_attention(heads, heads, heads, attn_mask=mask)


def test_masks_that_are_written_to() -> None:
    model, x = WritesMask().double(), torch.randn(2, 6, 8, dtype=torch.float64)
    expected = model(x)
    torch.testing.assert_close(autopar.parallelize(model, None)(x), expected)
