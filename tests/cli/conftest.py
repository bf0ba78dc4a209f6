"""Models in a file, for commands about them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = """
import torch
from torch import nn
from beside import WIDTH

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, WIDTH), nn.Linear(WIDTH, 16)

    def forward(self, x):
        return (self.down(self.up(x).relu()) - x).square().mean()

class Outputs(Net):
    def forward(self, x):
        return self.down(self.up(x).relu())

def make():
    torch.manual_seed(0)
    return Net(), (torch.randn(8, 16),)

def make_with_loss():
    return Outputs(), (torch.randn(8, 16),), lambda output, batch: (output - batch[0]).square().mean()

class Losses(Net):
    def forward(self, x):
        return {"total": super().forward(x), "largest": self.up(x).abs().max()}

def make_with_name():
    return Losses(), (torch.randn(8, 16),), "total"

def no_model(): return "model", ()
def no_pair(): return Net()
def other_names(): return Net(), {"x": torch.randn(8, 16), "y": 1}
def broken(): return 1 / 0
number = 3
"""


@pytest.fixture(scope="session")
def plans(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cache of plans that a user has: most commands here begin with the same searches."""
    return tmp_path_factory.mktemp("plans")


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plans: Path) -> Iterator[str]:
    """A file of models, in the working directory."""
    monkeypatch.setenv("AUTOPAR_CACHE", str(plans))
    path = list(sys.path)
    (tmp_path / "two_layers.py").write_text(SOURCE)
    (tmp_path / "beside.py").write_text("WIDTH = 32\n")
    monkeypatch.chdir(tmp_path)
    yield "two_layers.py"
    sys.path[:] = path
    sys.modules.pop("beside", None)
    sys.modules.pop("two_layers", None)
