"""Libraries are imported with the module for them, and a missing one is an error that says what to install."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import importlib
import re
import sys

import autopar
assert not any(name.startswith("autopar.integrations") for name in sys.modules)
for library, module in (
    ("accelerate", "hf_accelerate"), ("transformers", "hf_trainer"), ("lightning", "lightning_strategy"),
    ("ray", "ray"), ("torchft", "torchft"),
):
    sys.modules[library] = None  # as if it were not installed
    try:
        importlib.import_module("autopar.integrations." + module)
    except ImportError as e:
        assert re.search(f"pip install '?{library}", str(e)), e
    else:
        raise AssertionError(module)
    del sys.modules[library]
"""


@pytest.mark.slow
def test_missing_libraries() -> None:
    run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr
