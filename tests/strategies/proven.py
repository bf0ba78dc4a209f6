"""Writes ``strategies/proven.json``, how many sample calls prove each rule: ``python -m tests.strategies.proven``."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import autopar.strategies
from tests.strategies.samples import all_samples

FILE = Path(autopar.strategies.__file__).with_name("proven.json")


def counts() -> dict[str, int]:
    """Samples of each operator, all of which `test_rules` gives to the oracle."""
    return dict(sorted(Counter(str(s.target) for s in all_samples()).items()))


if __name__ == "__main__":
    FILE.write_text(json.dumps(counts(), indent=1) + "\n")
