"""Every registered rule is proven by the oracle on every sample of its operator."""

import json
from collections.abc import Callable

import pytest
import torch
from torch import fx
from torch.utils import _pytree as pytree

import autopar.strategies  # noqa: F401
from autopar.rules.oracle.call import rule_of
from autopar.rules.oracle.padding import check_padding
from autopar.rules.oracle.randomness import check_random
from autopar.rules.oracle.sharding import check_rule
from autopar.rules.rule import letter_sizes, registered
from autopar.sharding.lowered.emit import LocalTracer
from tests.strategies.proven import FILE, counts
from tests.strategies.sample import Sample, Samples, about, by_operator
from tests.strategies.samples import all_samples
from tests.strategies.stand_ins import STAND_INS

SAMPLES = all_samples()


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_every_rule_has_a_sample():
    sampled = {str(s.target) for s in SAMPLES}
    ours = {str(t) for t, f in registered().items() if f.__module__.startswith("autopar.")}  # tests have rules, too
    assert ours == sampled


def test_the_list_of_rules_says_how_many_samples():
    gone = {"aten.cholesky.default"} if not hasattr(torch.ops.aten, "cholesky") else set()  # since torch 2.14
    listed = {k: v for k, v in json.loads(FILE.read_text()).items() if k not in gone}
    assert listed == counts(), "run: python -m tests.strategies.proven"


@pytest.mark.parametrize("samples", by_operator(SAMPLES))
def test_rule(samples: Samples):
    for sample in samples:
        with about(sample):
            if rule_of(sample.target, sample.args, sample.kwargs).random:
                check_random(sample.target, sample.args, sample.kwargs)
            else:
                check_rule(sample.target, sample.args, sample.kwargs, run=STAND_INS.get(sample.target))


class _Alone:
    """A split over one device."""

    parts = steps = 1

    def __init__(self, sizes: dict[str, int], index: fx.Proxy) -> None:
        self.sizes, self.index = sizes, index

    def each_step(self) -> range:
        return range(self.steps)

    def axis_index(self) -> fx.Proxy:
        return self.index

    def local_size(self, letter: str) -> int:
        return self.sizes[letter]

    global_size = local_size

    def all_reduce(self, value: fx.Proxy, op: str, joined: bool = False) -> fx.Proxy:
        return value

    def swap_blocks(self, value: fx.Proxy, back: bool) -> fx.Proxy:
        return value

    def shift(self, value: fx.Proxy, back: bool = False) -> fx.Proxy:
        return value

    def start_shift(self, value: fx.Proxy) -> Callable[[], fx.Proxy]:
        return lambda: value

    def mirror(self, value: fx.Proxy) -> fx.Proxy:
        return value

    def all_gather(self, value: fx.Proxy) -> fx.Proxy:
        return torch.ops.aten.unsqueeze.default(value, 0)


LOWERED = [s for s in SAMPLES if rule_of(s.target, s.args, s.kwargs).lower]


@pytest.mark.parametrize("samples", by_operator(LOWERED))
def test_lowerings_write_graphs(samples: Samples):
    """Lowerings are called with graph proxies: they compute with operators only, and on one device what it does."""
    for sample in samples:
        with about(sample):
            check_lowerings(sample)


def check_lowerings(sample: Sample) -> None:
    rule = rule_of(sample.target, sample.args, sample.kwargs)
    tensors = [a for a in pytree.tree_leaves((sample.args, sample.kwargs)) if isinstance(a, torch.Tensor)]
    outputs = sample.target(*sample.args, **sample.kwargs)
    several = isinstance(outputs, tuple)
    expected = [
        t if d is not None else None for t, d in zip(outputs if several else (outputs,), rule.outputs, strict=True)
    ]
    sizes = letter_sizes(
        rule, [tuple(t.shape) for t in tensors], [None if t is None else tuple(t.shape) for t in expected]
    )
    for lowering in rule.lower.values():
        graph = fx.Graph()
        tracer, values = LocalTracer(graph), [0, *(t.to("meta") for t in tensors)]
        given = [graph.placeholder(f"t{i}") for i in range(len(values))]
        for node, value in zip(given, values, strict=True):
            node.meta["val"] = value
        index, *rest = (fx.Proxy(node, tracer) for node in given)
        local = iter(rest)
        args, kwargs = pytree.tree_map_only(
            torch.Tensor, lambda _, local=local: next(local), (sample.args, sample.kwargs)
        )
        context = _Alone(sizes, index)
        made = lowering.build(context, *args, **kwargs)
        if isinstance(made, tuple) or not several:
            graph.output([None if v is None else v.node for v in (made if several else (made,))])
        else:  # an operator with the same outputs
            graph.output([None if d is None else made[i].node for i, d in enumerate(rule.outputs)])
        actual = fx.GraphModule({}, graph)(0, *tensors)
        for found, wanted in zip(actual, expected, strict=True):
            assert (found is None) == (wanted is None)
            torch.testing.assert_close(
                found, wanted, rtol=0, atol=1e-12, equal_nan=True
            ) if wanted is not None else None


@pytest.mark.parametrize("samples", by_operator(SAMPLES))
def test_padding(samples: Samples):
    for sample in samples:
        with about(sample):
            check_padding(sample.target, sample.args, sample.kwargs, run=STAND_INS.get(sample.target))
