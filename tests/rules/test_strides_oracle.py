"""Kernels compute the same however their arguments lie in memory, or their rules say what they need."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from autopar.errors import InvalidRuleError
from autopar.ir.ops.attention import attention, attention_backward, attention_drawing_backward
from autopar.ir.ops.float8 import block_product, product
from autopar.ir.ops.routing import collect
from autopar.ir.ops.sequence.masked_attention import attention_masked, attention_masked_backward
from autopar.rules.oracle.call import map_tensors, rule_of
from autopar.rules.oracle.strides import check_strides
from autopar.rules.rule import ANY, LAST, MATRIX, PAIRS, ROW_MAJOR, Rule, find_rule, required_strides, rule
from autopar.rules.shapes.known_strides import ELEMENTWISE, LAST_RESULTS, OTHERWISE, ROW_MAJOR_RESULTS
from autopar.rules.strides import meet, meets, other_strides, random_strides
from tests.strategies.sample import Sample, Samples, about, by_operator, call, positive, x
from tests.strategies.samples import all_samples
from tests.strategies.stand_ins import STAND_INS

aten = torch.ops.aten
SAMPLES = [s for s in all_samples() if not rule_of(s.target, s.args, s.kwargs).random]

SEVERAL_RESULTS = {
    aten._linalg_det.default, aten._linalg_slogdet.default,  # factors of a matrix with equal rows
    aten.median.dim, aten.nanmedian.dim,  # where the median is, among equal numbers
    collect,  # of an order that names a row twice
}  # fmt: skip


def rows_of_batch_norm() -> list[Sample]:
    """Tensors that are channels-last whatever one does: their kernel reads what a channel has by itself."""
    found = []
    for train in (True, False):
        channels = [x(32), x(32), positive(32), x(32), positive(32)]
        args = (x(8, 32), x(8, 32), *channels, train, 1e-5, [True] * 3)
        found.append(call(aten.native_batch_norm_backward.default, *args))
    return found


ROWS = rows_of_batch_norm()


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("samples", by_operator([*SAMPLES, *ROWS]))
def test_rule(samples: Samples):
    for sample in samples:
        with about(sample):
            expanded, run = sample.target not in SEVERAL_RESULTS, STAND_INS.get(sample.target)
            check_strides(sample.target, sample.args, sample.kwargs, run=run, expanded=expanded)


DECLARED = [
    s for s in (*SAMPLES, *ROWS) if any(required_strides(s.target, rule_of(s.target, s.args, s.kwargs)))
    and (s.target != aten.native_batch_norm_backward.default or s.args[0].ndim == 2)
]  # fmt: skip
ON_GPUS_ONLY = {
    aten._fused_rms_norm_backward.default, aten._scaled_dot_product_efficient_attention_backward.default,
    aten._grouped_mm.default, attention_drawing_backward, product, block_product,
}  # fmt: skip
"""What stands in for their kernels here does not need what they do."""


def is_formula(sample: Sample) -> bool:
    """Whether attention is computed by its formula on a CPU: with the bias's gradient, and values of their own size."""
    if sample.target in (attention_masked, attention_masked_backward):
        query, _, value = sample.args[sample.target is attention_masked_backward :][:3]
        return query.shape[-1] != value.shape[-1] or sample.args[-1] is True
    if sample.target is attention_backward:
        return sample.args[-1] or sample.args[1].shape[-1] != sample.args[3].shape[-1]
    return sample.target is attention and sample.args[0].shape[-1] != sample.args[2].shape[-1]


@pytest.mark.parametrize("sample", DECLARED, ids=str)
def test_a_rule_that_does_not_say_what_its_kernel_needs_is_caught(sample: Sample):
    silent = replace(rule_of(sample.target, sample.args, sample.kwargs), strides=ANY)
    if sample.target in ON_GPUS_ONLY or is_formula(sample):
        return
    with pytest.raises(InvalidRuleError, match=r"Rule\(strides="):
        check_strides(sample.target, sample.args, sample.kwargs, run=STAND_INS.get(sample.target), rule=silent)


@pytest.mark.parametrize("need", [ROW_MAJOR, LAST, PAIRS, MATRIX])
def test_what_is_needed_is_met_with_the_same_values(need: str):
    for value in (x(2, 4, 6), x(4, 2), x(3, 1, 2), x(0, 2), x(2, 2, 1, 4)):
        for label, other in other_strides(value) if value.numel() else ():
            assert torch.equal(other, value), label
            found = meet(other, need)
            assert meets(found, need) and torch.equal(found, value), label
            assert meet(found, need) is found
        assert meet(value, need) is value


def test_random_strides_keep_values():
    draw = random.Random(0)
    for value in (x(2, 4, 6), x(4), x(), x(0, 2), torch.arange(8).view(2, 4) > 3, torch.complex(x(2, 4), x(2, 4))):
        for _ in range(10):
            assert torch.equal(random_strides(value, draw), value)
    assert len({random_strides(x(2, 4, 6), draw).stride() for _ in range(10)}) > 5


def _variants(sample: Sample):
    tensors: list[torch.Tensor] = []
    map_tensors((sample.args, sample.kwargs), tensors.append)
    ways = [dict(other_strides(t)) for t in tensors]
    draw = random.Random(0)
    yield sample.args, sample.kwargs
    for label in dict.fromkeys(label for found in ways for label in found):
        waiting = iter([found.get(label, t) for found, t in zip(ways, tensors, strict=True)])
        yield map_tensors((sample.args, sample.kwargs), lambda _, waiting=waiting: next(waiting))
    for _ in range(5):
        waiting = iter([draw.choice([t, *found.values()]) for found, t in zip(ways, tensors, strict=True)])
        yield map_tensors((sample.args, sample.kwargs), lambda _, waiting=waiting: next(waiting))


def _outputs(value) -> list[torch.Tensor]:
    return [t for t in (value if isinstance(value, tuple | list) else [value]) if isinstance(t, torch.Tensor)]


def _strides(value: torch.Tensor) -> tuple[int, ...]:
    return tuple(s for s, n in zip(value.stride(), value.shape, strict=True) if n > 1)


def test_results_that_are_known_to_be_row_major_are():
    seen = set()
    for sample in SAMPLES:
        if sample.target not in ROW_MAJOR_RESULTS or sample.target in STAND_INS:
            continue
        for args, kwargs in _variants(sample):
            seen.add(sample.target)
            assert all(t.is_contiguous() for t in _outputs(sample.target(*args, **kwargs))), sample
    unseen = {t for t in ROW_MAJOR_RESULTS - seen if t.namespace == "aten"}
    assert unseen <= {aten.contiguous.default}


def test_heads_come_last_in_what_attention_gives():
    for sample in SAMPLES:
        if sample.target in LAST_RESULTS and sample.target not in STAND_INS:
            assert sample.target(*sample.args, **sample.kwargs)[0].stride(-1) == 1


def test_elementwise_operators_lie_as_propagation_thinks():
    count = 0
    for sample in SAMPLES:
        elementwise = torch.Tag.pointwise in getattr(sample.target, "tags", ()) or sample.target in ELEMENTWISE
        if not elementwise or sample.target in OTHERWISE | ROW_MAJOR_RESULTS:
            continue
        for args, kwargs in _variants(sample):
            fake = map_tensors(
                (args, kwargs), lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")
            )
            real, meta = _outputs(sample.target(*args, **kwargs)), _outputs(sample.target(*fake[0], **fake[1]))
            assert [_strides(t) for t in real] == [_strides(t) for t in meta], sample
            count += 1
    assert count > 500


def test_rules_of_others_are_not_trusted():
    def mine(a, b):
        return Rule("a,a->a")

    foreign = "strides_test.mine.default"
    rule(foreign)(mine)
    assert find_rule(foreign) is mine
    assert required_strides(foreign, mine(None, None)) == (ROW_MAJOR, ROW_MAJOR)
    assert required_strides(foreign, replace(mine(None, None), strides=(LAST,))) == (LAST, ANY)
    assert required_strides(aten.relu.default, Rule("a->a")) == (ANY,)


def test_pairs_of_no_elements() -> None:
    """`view_as_complex` asks for even offsets of these, too."""
    empty = torch.arange(5.0)[1:1].view(0, 2)
    assert not meets(empty, PAIRS)
    assert torch.view_as_complex(meet(empty, PAIRS)).shape == (0,)
