"""``python -m autopar.integrations.recipe train.toml``, in each process of a run."""

from __future__ import annotations

import sys

from autopar.integrations.recipe.schema import read_recipe
from autopar.integrations.recipe.train import train

if __name__ == "__main__":
    train(read_recipe(sys.argv[1]))
