"""Messages of small parameters are counted as buckets are filled, and small models are predicted as simulated."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.compiler import rewrite, solve
from autopar.passes.collectives.bucket_collectives import filled
from autopar.search.options import Search
from autopar.search.overlap.buckets import Unit, sent_in_buckets
from autopar.simulate import simulate
from autopar.simulate.graph_tasks import emitted
from tests import models

UNITS = st.lists(st.builds(Unit, st.sampled_from([1.0, 2.0, 5.0, 30.0]), st.sampled_from([1.0, 1.5, 9.0])), max_size=5)


@given(UNITS, UNITS, UNITS, st.sampled_from([0.0, 3.0, 10.0, 100.0]), st.booleans())
def test_all_that_travels_is_in_a_message(
    first: list[Unit], second: list[Unit], third: list[Unit], limit: float, late: bool
) -> None:
    """Messages add up to the buckets, parts of each region to the whole; only what the pass begins with is shown."""
    units = {"first": first, "second": second, "third": third}
    ends = ("third", "second") if late else ("first", "second")
    sent, least = (sent_in_buckets(units, limit, ends, late=late, first_is_sent=known) for known in (True, False))
    every = [unit for own in units.values() for unit in own]
    count = sum(sent.messages.get(name, 0) * sum(unit.members for unit in own) for name, own in units.items())
    assert count == pytest.approx(len(filled([unit.bytes for unit in every], limit)))
    assert least.beside == sent.beside and least.messages == sent.messages
    for name in units:
        assert name == ends[0] or not any(least.shown.get(name, {}).values())
        assert sum(sent.beside[name].values()) == pytest.approx(1)
        assert all(part <= sent.beside[name][home] + 1e-12 for home, part in sent.shown.get(name, {}).items())
        assert not set(sent.shown.get(name, {})) - {ends[0], name}
    if limit == 100.0 and units[ends[0]] and sum(unit.bytes for unit in every) <= limit:  # all in one message
        assert all(sent.shown[name] == {ends[0]: pytest.approx(1)} for name, own in units.items() if own)
    if limit == 0.0:  # nothing travels with a unit of another region, but for the next region's first, beside this one
        assert all(home in (name, ends[0]) for name in units for home in sent.beside[name])
        assert set(sent.beside["first" if late else "third"]) == {"first" if late else "third"}


def test_graphs_of_stages_have_buckets_of_their_own() -> None:
    units = {"blocks": [Unit(1.0, 2.0)] * 8}
    together = sent_in_buckets(units, 100.0, ("blocks", "blocks"))
    assert together.messages == {"blocks": pytest.approx(1 / 16)} and together.most == {"blocks": pytest.approx(1)}
    apart = sent_in_buckets(units, 100.0, ("blocks", "blocks"), apart=2)
    assert apart.messages == {"blocks": pytest.approx(4 / 16)} and apart.most == {"blocks": pytest.approx(1 / 4)}


@pytest.mark.some(1)
@pytest.mark.parametrize(("name", "recipe", "axes"), [
    ("gpt2", "fsdp", {"a": 4}), ("vit", "ddp", {"a": 2, "b": 2}),
    *(pytest.param(*case, marks=pytest.mark.deep) for case in (
        ("gpt2", "fsdp", {"a": 2, "b": 2}), ("vit", "ddp", {"a": 4}), ("vit", "fsdp", {"a": 4}),
        ("vit", "fsdp", {"a": 2, "b": 2}), ("bert", None, {"a": 4}), ("bert", None, {"a": 2, "b": 2}),
    )),
])  # fmt: skip
def test_small_models_on_cpus_are_predicted_as_simulated(name: str, recipe: str | None, axes: dict[str, int]) -> None:
    """All of their parameters travel in a message or two; counted block by block, steps were 1.6 times as long."""
    program = models.captured(name)[0]
    plan = solve(program, axes, "cpu", search=Search(recipe=recipe, cache=False))
    simulated = simulate(emitted(rewrite(program, plan), plan)).step_seconds
    assert plan.predicted.step_seconds == pytest.approx(simulated, rel=0.05)
