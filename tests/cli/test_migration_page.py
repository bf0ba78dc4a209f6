"""Every `Search` of docs/migration.md is one that autopar has: planned, and verified, for a small transformer."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import autopar
from autopar.runtime.launch.environment import parse_axes

PAGE = Path(__file__).resolve().parents[2] / "docs" / "migration.md"


class Row(NamedTuple):
    """An option of another tool, the axes of the mesh, and the search."""

    there: str
    axes: dict[str, int]
    here: str


def rows(text: str) -> list[Row]:
    """Rows of the tables that have a search."""
    cells = [
        [cell.strip() for cell in line.strip("|\n ").split(" | ")] for line in text.splitlines() if line[:1] == "|"
    ]
    found = []
    for there, axes, here, *_ in (c for c in cells if len(c) >= 3):
        if match := re.fullmatch(r"`(Search\(.*\))`", here):
            found.append(Row(there, parse_axes(axes.strip("`")), match[1]))
    return found


ROWS = rows(PAGE.read_text(encoding="utf-8"))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        q, k, v = (p.reshape(rows, length, 4, 4).transpose(1, 2) for p in self.qkv(self.norm(x)).chunk(3, -1))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(nn.functional.gelu(self.up(x)))


class Transformer(nn.Module):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(64, 16), nn.Linear(16, 64)
        self.blocks = nn.Sequential(*(Block() for _ in range(blocks)))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.blocks(self.embed(ids)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def task(row: Row) -> tuple[nn.Module, Any, dict[str, Any]]:
    """A model for the row, its batch, and what is its loss."""
    torch.manual_seed(0)
    if "expert" in row.here:
        from tests.passes.canonicalize.test_experts import ROUTED, batch

        return ROUTED["bias"](), batch(8), {}
    ids = torch.randint(0, 64, (8, 8))
    # As many blocks as stages there may be.
    return Transformer(4 if "stages" in row.here else 1), {"ids": ids, "labels": ids.flip(0)}, {}


def test_every_table_has_rows() -> None:
    sections = re.split(r"^### ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    assert len(sections) == 7
    assert all(len(rows(section)) >= 4 for section in sections)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: re.sub(r"\W+", "-", row.there).strip("-"))
def test_a_row_is_a_search_of_its_mesh(row: Row) -> None:
    search = eval(row.here, {"Search": autopar.Search})
    search.require_axes(row.axes)


def test_a_row_that_is_wrong_is_noticed() -> None:
    (row,) = rows('| `--pipe` | `pp=2` | `Search(recipe="megatron", roles={"tp": "tensor"})` | |\n| `--no` | | - | |')
    with pytest.raises(ValueError, match="tp"):
        test_a_row_is_a_search_of_its_mesh(row)


DISTINCT = list({(tuple(row.axes.items()), row.here): row for row in ROWS}.values())


@pytest.mark.deep
@pytest.mark.parametrize("row", DISTINCT, ids=lambda row: re.sub(r"\W+", "-", row.here).strip("-"))
def test_a_row_computes_what_the_model_does(row: Row) -> None:
    model, batch, losses = task(row)
    search = eval(row.here, {"Search": autopar.Search})
    plan = autopar.plan(model, batch, cluster="h100", axes=row.axes, search=search, **losses)
    report = autopar.verify(model, batch, row.axes, plan=plan, **losses)
    assert report.max_error < 1e-9
