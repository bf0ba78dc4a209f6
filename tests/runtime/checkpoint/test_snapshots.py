"""Snapshots in memory: files that are whole, which parts make a state, who keeps copies, and who sends what."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from autopar.errors import AutoparError
from autopar.runtime.checkpoint import exchange as exchanging
from autopar.runtime.checkpoint.exchange import exchange
from autopar.runtime.checkpoint.snapshot_files import (
    Box,
    Moment,
    box_of,
    lacking,
    read_snapshot,
    snapshots_in,
    write_snapshot,
)
from autopar.runtime.checkpoint.snapshot_neighbors import neighbors
from autopar.runtime.launch.snapshot_folder import remove_abandoned, snapshot_folder
from autopar.runtime.mesh import one_device


def grid(shape: Sequence[int], parts: Sequence[int]) -> list[Box]:
    """A tensor in pieces as `torch.chunk` has them, some of them empty, in row-major order."""
    cuts = []
    for n, count in zip(shape, parts, strict=True):
        size = -(-n // count)
        starts = [min(n, i * size) for i in range(count)]
        cuts.append([(a, min(n, a + size) - a) for a in starts])
    return [Box(tuple(a for a, _ in cell), tuple(n for _, n in cell)) for cell in itertools.product(*cuts)]


def test_any_parts_from_any_ranks_that_have_them() -> None:
    """Each rank in turn, in one process: what it takes is what the others send it."""
    draw = random.Random(49000000)
    for _ in range(60):
        world, before = draw.randint(1, 5), draw.randint(1, 6)
        whole = {
            f"t{i}": torch.randn([draw.randint(1, 7) for _ in range(draw.randint(0, 3))]).to(
                draw.choice((torch.float64, torch.bfloat16))
            )
            for i in range(3)
        }

        def split(count: int, whole: dict[str, torch.Tensor] = whole) -> list[dict[str, Box]]:
            found: list[dict[str, Box]] = [{} for _ in range(count)]
            for name, tensor in whole.items():
                d = draw.randrange(tensor.ndim + 1)  # the last: whole on every rank
                parts = [count if i == d else 1 for i in range(tensor.ndim)]
                boxes = grid(tensor.shape, parts) if d < tensor.ndim else [box_of(tensor)] * count
                for rank, box in enumerate(boxes):
                    found[rank][name] = box
            return found

        old, needed = split(before), split(world)
        held: list[dict[str, list[Box]]] = [{} for _ in range(world)]
        for boxes in old:  # each on one rank or on two
            for rank in draw.sample(range(world), min(world, draw.randint(1, 2))):
                for name, box in boxes.items():
                    held[rank].setdefault(name, []).append(box)
        zero = {name: (0,) * t.ndim for name, t in whole.items()}

        def cut(name: str, box: Box, whole: dict[str, torch.Tensor] = whole, zero: dict = zero) -> torch.Tensor:  # type: ignore[type-arg]
            return whole[name][box.within(Box(zero[name], tuple(whole[name].shape)))]

        for taker in range(world):
            targets = {name: torch.full_like(cut(name, box), -7) for name, box in needed[taker].items()}
            for sender in range(world):
                for p in exchanging._pieces(list(whole), sender, taker, needed, held):
                    assert p.held in held[sender][p.name]
                    exchanging._put(targets, needed[taker], p, cut(p.name, p.held)[p.box.within(p.held)])
            assert all(torch.equal(t, cut(name, needed[taker][name])) for name, t in targets.items())


def test_one_process_takes_all_of_its_files(tmp_path: Path) -> None:
    x = torch.arange(12.0).view(4, 3)
    files = [
        write_snapshot(
            tmp_path, Moment(3, 1, "ab"), r, {}, {"x": (box, x[box.within(box_of(x))]), "n": (box_of(x[0, 0]), x[0, 1])}
        )
        for r, box in enumerate(grid(x.shape, (3, 1)))
    ]
    snapshots = [read_snapshot(f) for f in files]
    assert [s.boxes["x"].sizes for s in snapshots] == [(2, 3), (2, 3), (0, 3)]
    targets = {"x": torch.zeros(4, 3), "n": torch.zeros(())}
    held = {name: [s.boxes[name] for s in snapshots] for name in targets}

    def part(name: str, box: Box) -> torch.Tensor:
        return next(s.tensor(name) for s in snapshots if s.boxes[name] == box)

    exchange(one_device(torch.device("cpu")), None, targets, [{n: box_of(t) for n, t in targets.items()}], [held], part)
    assert torch.equal(targets["x"], x) and targets["n"] == 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int8, torch.bool, torch.float8_e4m3fn])
def test_a_file_gives_back_what_was_written(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = {
        "a": torch.randint(0, 2, (5, 3)).to(dtype),
        "b": torch.ones(()).to(dtype),
        "c": torch.zeros(0, 3).to(dtype),
    }
    about = {"manifest": "{}", "alike": ["python"]}
    path = write_snapshot(tmp_path, Moment(7, 2, "cd"), 5, about, {n: (box_of(t), t) for n, t in tensors.items()})
    (tmp_path / "half.partial").write_bytes(b"x")
    (found,) = snapshots_in(tmp_path)
    assert (found.file, found.moment, found.rank, found.about) == (path, Moment(7, 2, "cd"), 5, about)
    for name, tensor in tensors.items():
        assert found.tensor(name).dtype == dtype
        assert torch.equal(found.tensor(name).reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))
    assert [p.name for p in tmp_path.iterdir()] == [path.name]  # what a killed writer has left is gone


def test_a_file_that_has_no_room_is_an_error_that_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.open", full)
    with pytest.raises(AutoparError, match=r"a snapshot of 64 bytes could not be written to .*: No space left .* room"):
        write_snapshot(
            tmp_path, Moment(0, 1, "x"), 0, {}, {"a": (Box((0,), (8,)), torch.zeros(8, dtype=torch.float64))}
        )


def test_what_is_missing() -> None:
    left, right = grid((4, 6), (1, 2))
    assert lacking({"w": (4, 6), "b": ()}, [{"w": left, "b": Box((), ())}, {"w": left}]) == ["w"]
    assert lacking({"w": (4, 6)}, [{"w": left}, {"w": right, "random": left}, {"w": left}]) == []


def test_copies_are_on_other_nodes() -> None:
    for nodes, copies in (("aabbcc", 1), ("abc", 2), ("ab", 5), ("aab", 1), ("abab", 1)):
        kept = {r: neighbors(list(nodes), r, copies) for r in range(len(nodes))}
        for r, (to, sources) in kept.items():
            distinct = {nodes[q] for q in to}
            assert len(distinct) == len(to) == min(copies, len(set(nodes)) - 1) and nodes[r] not in distinct
            assert all(r in kept[s][0] for s in sources) and all(r in kept[q][1] for q in to)
    assert neighbors(["a", "a"], 0, 1) == ([], [])


def test_folders_of_launchers_that_are_gone_are_deleted(tmp_path: Path) -> None:
    with snapshot_folder(tmp_path) as mine:
        (tmp_path / "autopar-snapshots-gone").mkdir()
        (tmp_path / "autopar-snapshots-gone" / "x.snapshot").touch()
        (tmp_path / "another").mkdir()
        remove_abandoned(tmp_path)
        assert sorted(p.name for p in tmp_path.iterdir()) == ["another", mine.name]
    assert [p.name for p in tmp_path.iterdir()] == ["another"]
