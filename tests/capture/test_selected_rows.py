"""What a mask selects (`x[mask]`, `nonzero`, `masked_select`) is computed as eager mode does, on all rows."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import sympy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

import autopar
from autopar import parallelize
from autopar.capture.export import capture
from autopar.capture.selected.dims import Factor, divided, merged
from autopar.capture.selected.questions import of_many
from autopar.errors import CaptureError

SAMPLES, TOKENS, WIDTH, WORDS = 4, 6, 8, 16

Loss = Callable[["Picks", Tensor, Tensor], Tensor]


class Picks(nn.Module):
    """The sum of some losses of tokens and labels, some of which are -100."""

    def __init__(self, *losses: Loss) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.words, self.places = (nn.Embedding(n, WIDTH, dtype=torch.float64) for n in (WORDS, 32))
        self.out, self.norm = nn.Linear(WIDTH, WORDS, dtype=torch.float64), nn.LayerNorm(WIDTH, dtype=torch.float64)
        self.batch_norm = nn.BatchNorm1d(WIDTH, dtype=torch.float64)
        self.scale = nn.Parameter(torch.rand(WIDTH, dtype=torch.float64) + 0.5)
        self.losses = losses

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        found = [loss(self, ids, labels) for loss in self.losses]
        return torch.stack(found).sum()

    def logits(self, ids: Tensor, labels: Tensor) -> Tensor:
        return self.out(self.words(ids)[labels != -100])


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    ids, labels = (torch.randint(0, WORDS, (SAMPLES, TOKENS), generator=g) for _ in range(2))
    return ids, labels.masked_fill(torch.rand(SAMPLES, TOKENS, generator=g) < 0.4, -100)


def cross_entropy(m: Picks, ids: Tensor, labels: Tensor) -> Tensor:
    rows, own = m.logits(ids, labels), labels[labels != -100]
    smooth = F.cross_entropy(rows, own, label_smoothing=0.1, weight=m.scale.detach().repeat(2))
    return (
        F.cross_entropy(rows, own, reduction="sum") / rows.shape[0] + smooth + F.cross_entropy(rows, rows.softmax(-1))
    )


def put_back(m: Picks, ids: Tensor, labels: Tensor) -> Tensor:
    mask, x = labels != -100, m.words(ids).clone()
    x[mask] = torch.tanh(m.norm(x[mask]) * m.scale)
    x[ids > 4] += m.scale
    y = x.masked_scatter(mask.unsqueeze(-1), torch.tanh(x[mask]))
    return m.out(y).square().mean() + y.masked_select(mask.unsqueeze(-1)).square().mean()


def by_parts(m: Picks, ids: Tensor, labels: Tensor) -> Tensor:
    """As splines have it: elements inside of an interval, and outside, each by their own formula."""
    x = m.words(ids)
    inside = (x > -0.5) & (x < 0.5)
    y = torch.zeros_like(x)
    y[inside] = torch.sqrt(x[inside] + 0.5) + torch.log(x[inside] + 0.6)
    y[~inside] = x[~inside]
    return (y * m.scale).square().sum()


def numbers(m: Picks, ids: Tensor, labels: Tensor) -> Tensor:
    i, j = torch.where(labels != -100)
    x = m.out(m.words(ids))
    flat = torch.nonzero(labels.view(-1) != -100).view(-1)
    rows = x.view(-1, WORDS).index_select(0, flat)
    back = torch.zeros(SAMPLES * TOKENS, WORDS, dtype=x.dtype).index_copy(0, flat, rows.tanh())
    return F.cross_entropy(x[i, j], labels[i, j]) + back.square().mean()


def experts(m: Picks, ids: Tensor, labels: Tensor) -> Tensor:
    x = m.words(ids).view(-1, WIDTH)
    out, chosen = torch.zeros_like(x), ids.view(-1) % 3
    for e in range(3):
        (own,) = torch.where(chosen == e)
        out.index_add_(0, own, torch.relu(x[own] * (e + 1)) * m.scale)
    return m.out(out).square().mean()


def pairs(m: Picks, ids: Tensor, labels: Tensor) -> Tensor:
    x, y = F.normalize(m.words(ids).mean(1) + m.scale, dim=-1), ids[:, 0] % 2
    same = y[:, None] == y
    others = same & ~torch.eye(SAMPLES, dtype=torch.bool)
    a, p, n = torch.where(others.unsqueeze(2) & ~same.unsqueeze(1))
    distances = torch.cdist(x, x)
    loss = F.relu(distances[a, p] - distances[a, n] + 0.5)
    return loss[loss > 0.1].mean() + loss.sum() + distances[~same].exp().mean()


def statistics(m: Picks, ids: Tensor, labels: Tensor) -> Tensor:
    r = m.logits(ids, labels)
    sums = r.std(0).sum() + r.var() + r.max(0).values.sum() + r.amin() + r.logsumexp(0).sum() + r.norm()
    some = (r > 0).any(0).sum() + (r > 0).all() + torch.count_nonzero(r > 0) + (r > 0.2).sum()
    return sums + r.mean() * some + r.cumsum(0).square().mean() + (r.T @ r / r.shape[0]).square().mean()


def attention(m: Picks, ids: Tensor, labels: Tensor) -> Tensor:
    some = m.words(ids)[(labels != -100).any(1)].unsqueeze(1)
    rows = m.words(ids)[labels != -100]
    pooled = ((rows @ m.scale).softmax(0) @ rows).square().sum()
    return m.out(F.scaled_dot_product_attention(some, some, some)).square().mean() + pooled


def picks(m: Picks, ids: Tensor, labels: Tensor) -> Tensor:
    rows, own = m.logits(ids, labels), labels[labels != -100]
    logs = rows.log_softmax(-1)
    best = -logs[torch.arange(rows.shape[0]), own].mean()
    return best + (F.one_hot(own, WORDS) * rows).sum(-1).mean() + F.multi_margin_loss(rows, own)


def contrast(m: Picks, ids: Tensor, labels: Tensor) -> Tensor:
    rows = F.normalize(m.words(ids)[labels != -100] + m.scale, dim=-1)
    rows = rows + m.places(torch.arange(rows.shape[0]))
    likeness = m.out(rows)[:, :WIDTH] @ rows.T
    return F.cross_entropy(likeness, torch.arange(likeness.shape[0]))


def nested(m: Picks, ids: Tensor, labels: Tensor) -> Tensor:
    mask = labels != -100
    rows, own = m.out(m.words(ids)[mask]), labels[mask]
    both = torch.cat([rows, m.out(m.words(ids))[ids < 4], m.out(m.words(ids))[0]])
    few = rows[own > 4]
    return F.cross_entropy(few, own[own > 4]) + both.square().mean() + m.words(ids)[:, (ids > 3).any(0)].mean()


def sums_by_group(m: Picks, ids: Tensor, labels: Tensor) -> Tensor:
    rows, group = m.logits(ids, labels), ids[labels != -100] % 3
    total = torch.zeros(3, WORDS, dtype=rows.dtype).index_add(0, group, rows)
    count = torch.zeros(3, dtype=rows.dtype).scatter_add(0, group, torch.ones_like(group, dtype=rows.dtype))
    return (total / count.clamp_min(1)[:, None]).square().sum()


def left_out_is_no_number(m: Picks, ids: Tensor, labels: Tensor) -> Tensor:
    """Of what is left out these are not numbers, or infinite, and so are their gradients."""
    x = m.words(ids).sum(-1) * m.scale.sum()
    r = x[x > 0]
    whole = (labels[ids > 0].clamp_min(0) + 7) // ids[ids > 0] + labels[ids > 0] % ids[ids > 0]
    roots = (torch.sqrt(r * m.scale[1]) / r).sum() + (r ** m.scale[2]).mean() + torch.acosh(1 + r * m.scale[3]).mean()
    return (torch.log(r) * m.scale[0]).mean() + roots + (m.words(ids)[ids > 0] * whole.unsqueeze(-1)).mean()


def normalized(m: Picks, ids: Tensor, labels: Tensor) -> Tensor:
    return m.out(m.batch_norm(m.words(ids)[labels != -100])).square().mean()


def elementwise(m: Picks, ids: Tensor, labels: Tensor) -> Tensor:
    rows, own = m.words(ids)[labels != -100], labels[labels != -100]
    values = F.binary_cross_entropy_with_logits(rows[:, 0], (own > 7).double()) + F.mse_loss(
        rows @ m.scale, own.double()
    )
    likeness = F.cosine_similarity(rows, m.scale[None]).mean()
    return (
        values + likeness + F.smooth_l1_loss(rows, rows.detach() * 2) + torch.where(rows > 0, rows, rows * 0.1).mean()
    )


def by_sample_and_place(m: Picks, ids: Tensor, labels: Tensor) -> Tensor:
    """Losses by sample, some elements of rows, and rows of two masks, one of what the other selects."""
    mask, x = labels != -100, m.words(ids).clone()
    sample, at = mask.nonzero(as_tuple=True)
    own = x[sample, at] * x.mean(1)[sample]
    sums = torch.zeros(SAMPLES, dtype=x.dtype).scatter_add_(0, sample, own.sum(-1))
    means = sums / torch.bincount(sample, minlength=SAMPLES).clamp(min=1)
    x[mask, 0] = x[mask, 1] * 2
    few = x[ids > 4][mask[ids > 4]]
    each = torch.stack([x[i][mask[i]].sum(0) for i in range(SAMPLES)])
    return means.square().sum() + few.square().mean() + m.out(each).square().mean()


def of_each_other(m: Picks, ids: Tensor, labels: Tensor) -> Tensor:
    rows, own = m.words(ids)[labels != -100], labels[labels != -100]
    n, distances = len(rows), (rows[None] - rows[:, None]).square().sum(-1)
    others = (distances * (1 - torch.eye(n, dtype=rows.dtype))).sum() / (n * (n - 1))
    upper = (distances * torch.ones(n, n, dtype=rows.dtype).triu(1)).sum() + (rows @ rows.T).tril().mean()
    return others + upper + distances[own[:, None] == own].mean()


def losses(m: Picks, ids: Tensor, labels: Tensor) -> Tensor:
    r, own = m.out(m.words(ids))[labels != -100], labels[labels != -100]
    t, q, sign = torch.tanh(r.detach()) + 0.1, r.sigmoid(), (own % 2 * 2 - 1).double()
    values = F.l1_loss(r, t) + F.huber_loss(r, t) + F.gaussian_nll_loss(r, t, q + 0.1) + F.poisson_nll_loss(r, t.abs())
    values = values + F.binary_cross_entropy(q, t.clamp(0, 1)) + F.soft_margin_loss(r[:, 0], sign)
    values = values + F.hinge_embedding_loss(r[:, 1], sign) + F.margin_ranking_loss(r[:, 0], r[:, 1], sign)
    values = values + F.cosine_embedding_loss(r, t, sign) + F.triplet_margin_loss(r, t, t.flip(1))
    spread, mean = torch.var_mean(r, 0)
    return values + F.multilabel_soft_margin_loss(r, t.clamp(0, 1)) + spread.sum() + mean.square().sum()


def layers(m: Picks, ids: Tensor, labels: Tensor) -> Tensor:
    r = m.words(ids)[labels != -100]
    a, b = F.group_norm(r, 2).chunk(2, -1)
    turned = torch.cat([b, a], -1).view(-1, 2, 4).transpose(1, 2).reshape(-1, WIDTH)
    kernel = m.scale.view(1, 1, WIDTH)[..., :3]
    return m.out(turned).square().mean() + F.conv1d(r.unsqueeze(1), kernel).mean() + F.glu(r).sum() + F.elu(r).mean()


def recomputed(m: Picks, ids: Tensor, labels: Tensor) -> Tensor:
    def loss(x: Tensor, mask: Tensor) -> Tensor:
        return F.cross_entropy(m.out(x[mask] * m.scale), labels[mask])

    found: Tensor = checkpoint(loss, m.words(ids), labels != -100, use_reentrant=False)
    return found


def asked(m: Picks, ids: Tensor, labels: Tensor) -> Tensor:
    rows = m.logits(ids, labels)
    if rows.numel() == 0:
        return rows.sum()
    return rows.mean() + rows.sum() / max(len(rows), 1)


LOSSES = (
    cross_entropy, put_back, by_parts, numbers, experts, pairs, statistics, attention, picks, contrast, nested,
    sums_by_group, left_out_is_no_number, normalized, elementwise, by_sample_and_place, of_each_other, losses, layers,
    recomputed, asked,
)  # fmt: skip


@pytest.mark.some(2)
@pytest.mark.parametrize("first", range(5))
def test_equals_eager_mode(first: int) -> None:
    report = autopar.verify(Picks(*LOSSES[first::5]), batch(first), {"a": 2, "b": 2}, plan="random", seed=first)
    assert report.reference == "eager"
    assert report.max_error < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("seed", range(2))
def test_each_equals_eager_mode(loss: Loss, seed: int) -> None:
    report = autopar.verify(Picks(loss), batch(seed + 2), {"a": 2, "b": 2}, plan="random", seed=seed)
    assert report.reference == "eager"
    assert report.max_error < 1e-12


@pytest.mark.some(1)
@pytest.mark.parametrize("losses", [(put_back,), (picks, elementwise, recomputed)])
def test_microbatches(losses: tuple[Loss, ...]) -> None:
    pins = {"microbatches": 2}
    report = autopar.verify(Picks(*losses, plain_cross_entropy), batch(1), {"a": 2}, plan="random", seed=1, pins=pins)
    assert report.max_error < 1e-12


def plain_cross_entropy(m: Picks, ids: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(m.logits(ids, labels), labels[labels != -100])


def none_selected() -> tuple[Tensor, Tensor]:
    ids, labels = batch()
    return ids, torch.full_like(labels, -100)


def sums(m: Picks, ids: Tensor, labels: Tensor) -> Tensor:
    rows = m.logits(ids, labels)
    return rows.sum() + m.out(m.words(ids)).mean()


def means(m: Picks, ids: Tensor, labels: Tensor) -> Tensor:
    return m.logits(ids, labels).mean()


@pytest.mark.parametrize("loss", [sums, means])
def test_no_row_is_selected(loss: Loss) -> None:
    plain, model = Picks(loss), Picks(loss)
    expected, found = plain(*none_selected()), parallelize(model, None)(*none_selected())
    expected.backward()
    found.backward()
    assert torch.equal(found, expected) or (found.isnan() and expected.isnan())
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        if b.grad is not None:
            torch.testing.assert_close(a.grad, b.grad, equal_nan=True)


def largest(m: Picks, ids: Tensor, labels: Tensor) -> Tensor:
    return m.logits(ids, labels).amax()


def of_a_sample(m: Picks, ids: Tensor, labels: Tensor) -> Tensor:
    """Variances need two rows."""
    rows = m.logits(ids, labels)
    return rows.mean() if rows.shape[0] > 1 else rows.sum()


@pytest.mark.parametrize("loss", [asked, largest, of_a_sample])
def test_graphs_are_of_some_rows(loss: Loss) -> None:
    model = parallelize(Picks(loss), None)
    ids, labels = batch()
    torch.testing.assert_close(model(ids, labels), Picks(loss)(ids, labels))
    with pytest.raises(ValueError, match=r"how many rows a mask selects, at .*test_selected_rows\.py:\d+.*fewer"):
        model(*none_selected())


def as_many_as_samples(m: Picks, ids: Tensor, labels: Tensor) -> Tensor:
    """Each sample has one target, as margins of classes have it: the number of rows is known from what they meet."""
    logits = m.out(m.words(ids[:, 0]))
    mask = torch.zeros_like(logits)
    mask[torch.arange(SAMPLES), ids[:, 1]] = 1.0 + (ids[:, 1] == ids[0, 1]).double() * (ids[0, 2] == 0)
    own = logits[mask == 1]
    return F.cross_entropy(logits + mask * (torch.cos(own.clamp(-1, 1).acos() + 0.3) - own).unsqueeze(1), ids[:, 1])


@pytest.mark.some(1)
def test_a_number_of_rows_that_is_known() -> None:
    ids, labels = batch(3)
    ids[0, 2] = 1
    report = autopar.verify(Picks(as_many_as_samples), (ids, labels), {"a": 2, "b": 2}, plan="random")
    assert report.reference == "eager"
    assert report.max_error < 1e-12
    model = parallelize(Picks(as_many_as_samples), None)
    model(ids, labels)
    ids[0, 2] = 0
    with pytest.raises(ValueError, match=rf"has to select {SAMPLES} elements.*test_selected_rows\.py"):
        model(ids, labels)


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        (lambda u, v: sympy.Eq(u, 0), (1, False)),
        (lambda u, v: sympy.Eq(u, 1), (2, False)),
        (lambda u, v: 16 * u <= 1, (1, False)),
        (lambda u, v: u > 0, (1, True)),
        (lambda u, v: sympy.Eq(u, 24), (0, None)),
        (lambda u, v: u > 10, (0, None)),
        (lambda u, v: u < v, (0, None)),
        (lambda u, v: sympy.Eq(u, v), (0, None)),
        (lambda u, v: sympy.Eq(3 * u * v, 0), (1, False)),
        (lambda u, v: sympy.And(u > 0, v > 1), (2, True)),
        (lambda u, v: sympy.Eq(u // 2, 0), (0, None)),
        (lambda u, v: sympy.Ge(u, 0), (0, True)),
        (lambda u, v: -u < 0, (1, True)),
    ],
)
def test_what_is_true_of_many_rows(condition: Callable[..., Any], expected: tuple[int, bool | None]) -> None:
    u, v = sympy.symbols("u v", integer=True)
    asked = condition(u, v)
    least, answer = of_many(asked)
    assert (least, answer) == expected
    if answer is not None:
        for n, m in itertools.product(range(least, 40), repeat=2):
            assert bool(asked.xreplace({u: sympy.Integer(n), v: sympy.Integer(m)})) == answer


def returned(m: Picks, ids: Tensor, labels: Tensor) -> Tensor:
    return m.logits(ids, labels)


def other_masks(m: Picks, ids: Tensor, labels: Tensor) -> Tensor:
    x = m.out(m.words(ids))
    return (x[labels != -100] * x[labels > -50]).mean()


def first_row(m: Picks, ids: Tensor, labels: Tensor) -> Tensor:
    return m.logits(ids, labels)[0].sum()


def in_order(m: Picks, ids: Tensor, labels: Tensor) -> Tensor:
    return m.logits(ids, labels).sort(0).values.sum()


def dropped(m: Picks, ids: Tensor, labels: Tensor) -> Tensor:
    return F.dropout(m.logits(ids, labels), 0.5).mean()


def more_than(m: Picks, ids: Tensor, labels: Tensor) -> Tensor:
    rows = m.logits(ids, labels)
    return rows.mean() if rows.shape[0] > 10 else rows.sum()


def by_sample(m: Picks, ids: Tensor, labels: Tensor) -> Tensor:
    return m.logits(ids, labels).reshape(SAMPLES, -1, WORDS).mean(1).square().sum()


def different_tokens(m: Picks, ids: Tensor, labels: Tensor) -> Tensor:
    return m.out(m.words(labels[labels != -100].unique())).mean()


def sliding(m: Picks, ids: Tensor, labels: Tensor) -> Tensor:
    return F.conv1d(m.logits(ids, labels).T, torch.ones(WORDS, WORDS, 3, dtype=torch.float64)).mean()


REFUSED = {
    returned: "returns, or keeps, what a mask selects",
    other_masks: "rows of one mask meet others",
    first_row: "is given what a mask selects",
    in_order: "it looks at all of them at once",
    dropped: "it draws a number for each row",
    more_than: "control flow that depends on data",
    by_sample: "divides rows between dims",
    different_tokens: "control flow that depends on data",
    sliding: "is given what a mask selects",
}


@pytest.mark.parametrize("loss", REFUSED)
def test_what_cannot_be_told_is_refused(loss: Loss) -> None:
    class Alone(Picks):
        def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
            return self.losses[0](self, ids, labels)

    with pytest.raises(CaptureError, match=REFUSED[loss]) as e:
        capture(Alone(loss), batch())
    assert loss is returned or "test_selected_rows.py" in str(e.value)


def test_a_mask_that_is_written_to_is_another() -> None:
    def loss(m: Picks, ids: Tensor, labels: Tensor) -> Tensor:
        mask, x = labels != -100, m.out(m.words(ids)).detach() * m.scale.repeat(2)
        first = x.detach()[mask].sum()
        mask[0] = False
        return first + x[mask].mean()

    report = autopar.verify(Picks(loss), batch(), {"a": 2}, plan="random")
    assert report.reference == "eager"
    assert report.max_error < 1e-12


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 5), st.booleans()), min_size=1, max_size=5))
def test_dims_are_merged_and_divided(parts: list[tuple[int, bool]]) -> None:
    dims = [(n, (Factor(n, i),) if masked and n > 1 else None) for i, (n, masked) in enumerate(parts)]
    assert divided(merged(dims), [n for n, _ in dims]) == [dim for _, dim in dims]
