"""`import autopar` is quick, and its names are what they say, whatever is imported before them."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest

import autopar

QUICK = """
import sys
import autopar
assert not {"torch", "sympy", "highspy"} & set(sys.modules), "a library comes with the first name that needs it"
import autopar.cli
assert "torch" not in sys.modules
"""

ANY_ORDER = """
import autopar.parallelize, autopar.verify.verify, autopar.rules.rule
import autopar
from autopar import parallelize, plan, rule, verify
for name in ("parallelize", "plan", "rule", "verify"):
    assert callable(getattr(autopar, name)), name
assert autopar.verify is verify and autopar.parallelize is parallelize
from autopar import *
assert Search().recipe is None and set(autopar.__all__) <= set(dir(autopar))
"""


CHECKPOINT = """
import autopar
assert callable(autopar.checkpoint.save) and callable(autopar.checkpoint.torch_save)
"""

RULES = """
import torch
from autopar.errors import InvalidRuleError
from autopar.rules.oracle.sharding import check_rule
from autopar.rules.rule import find_rule, rule
try:
    rule(torch.ops.aten.mm.default)(lambda a, b: None)
except InvalidRuleError as e:
    assert "already has a rule: autopar.strategies" in str(e)
else:
    raise AssertionError("two rules")
assert find_rule(torch.ops.aten.add.Tensor) is not None
"""


@pytest.mark.some(2)
@pytest.mark.parametrize("script", [QUICK, ANY_ORDER, CHECKPOINT, RULES])
def test_in_a_fresh_process(script: str) -> None:
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr


def test_a_function_that_uses_it_can_be_sent() -> None:
    assert pickle.loads(pickle.dumps(autopar)) is autopar


def test_names() -> None:
    for name in autopar.__all__:
        assert getattr(autopar, name).__name__ == name
    with pytest.raises(AttributeError, match="module 'autopar' has no attribute 'paralelize'"):
        autopar.paralelize  # noqa: B018
