"""`Case`: one random program of the fuzzer as a value, drawn from a seed."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from random import Random
from typing import Any

from tests.fuzz import (
    pieces_backward,
    pieces_hooks,
    pieces_layers,
    pieces_math,
    pieces_python,
    pieces_state,
    pieces_views,
)
from tests.fuzz.boundary import OUTPUTS, SIGNATURES, Output, Signature
from tests.fuzz.piece import At, Piece, unchanged

GROUPS: dict[str, tuple[Piece, ...]] = {
    "backward": pieces_backward.PIECES,
    "hooks": pieces_hooks.PIECES,
    "buffers": pieces_state.BUFFERS,
    "attributes read": pieces_state.READ,
    "attributes written": pieces_state.WRITTEN,
    "changed Python": pieces_python.CHANGED,
    "driven Python": pieces_python.DRIVEN,
    "norms": pieces_layers.NORMS,
    "convolutions": pieces_layers.CONVOLUTIONS,
    "attention": pieces_layers.ATTENTION,
    "other layers": pieces_layers.OTHERS,
    "shared": pieces_layers.SHARED,
    "views": pieces_views.VIEWS,
    "writes": pieces_views.WRITES,
    "selections": pieces_views.SELECTIONS,
    "algebra": pieces_math.ALGEBRA,
    "regions": pieces_math.REGIONS,
}
BY_NAME: dict[str, Piece] = {p.name: p for group in GROUPS.values() for p in group}
SIGNATURE: dict[str, Signature] = {s.name: s for s in SIGNATURES}
OUTPUT: dict[str, Output] = {o.name: o for o in OUTPUTS}

OPTIMIZERS = (
    "torch.optim.SGD(model.parameters(), lr=0.1)",
    "torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)",
    "torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)",
    "torch.optim.Adagrad(model.parameters(), lr=0.01, eps=1e-3)",
)
RARE = frozenset(
    [
        *("python random", "numpy random", "random layer", "sparse embedding", "input written", "function", "iterator"),
        *("generator", "closure that counts", "numpy array written", "set written", "attribute of a parameter written"),
        *("generator of torch", "seed set in forward", "generator forked", "module in a plain list"),
    ]
)
"""Features that end in an error by design: one in four of those drawn stays."""

PLACES = ("root", "child", "nested", "twice")
LONGEST = 8
WIDEST = 12


@dataclass(frozen=True)
class Block:
    """Pieces that stand together, each a name and a seed: in the root, in a child, in its child, or called twice."""

    place: str
    pieces: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Call:
    """One call of a training loop.

    Attributes:
        rows: of the batch.
        training: mode.
        gradient: whether it is under ``enable_grad`` and followed by a backward pass.
        step: whether the optimizer steps behind it; else gradients add up.
        changes: which of the pieces' changes run in front of it, by position.
    """

    rows: int
    training: bool = True
    gradient: bool = True
    step: bool = True
    changes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Case:
    """A module and a training loop.

    Attributes:
        seed: of weights and of choices in the boundary.
        length: of the activation.
        channels: of the activation.
        blocks: the body.
        signature: name.
        output: name.
        calls: of the loop.
        optimizer: text.
        original: changes of the root are made on the model that was given, not on the one returned.
    """

    seed: int
    length: int
    channels: int
    blocks: tuple[Block, ...]
    signature: str
    output: str
    calls: tuple[Call, ...]
    optimizer: str
    original: bool = False

    @property
    def features(self) -> tuple[str, ...]:
        """Names of all that it is made of."""
        return (*(name for b in self.blocks for name, _ in b.pieces), f"in: {self.signature}", f"out: {self.output}")

    def as_json(self) -> str:
        return json.dumps(asdict(self))


COMPILED = ("regions", "compiled")
"""Modes on one device with ``compile=``: a backend that runs what it is given, and inductor."""


def from_json(text: str) -> Case:
    """A case of what `Case.as_json` gives."""
    raw: dict[str, Any] = json.loads(text)
    blocks = tuple(Block(b["place"], tuple((n, s) for n, s in b["pieces"])) for b in raw.pop("blocks"))
    calls = tuple(Call(**{**c, "changes": tuple(c["changes"])}) for c in raw.pop("calls"))
    return Case(blocks=blocks, calls=calls, **raw)


def draw(seed: int, mode: str = "one", only: Sequence[str] = ()) -> Case:
    """The case of a seed.

    Args:
        seed: gives everything.
        mode: ``"one"``, ``"plans"`` or ``"ranks"``: with devices, sizes mostly divide, and a plan sees one call. Those
            of `COMPILED` have the cases of ``"one"``.
        only: a module of these features, alone.
    """
    mode = "one" if mode in COMPILED else mode
    random = Random(f"{mode} {seed}")
    even = mode != "one" and random.random() < 0.7
    length = random.choice((2, 4) if even else (1, 2, 3, 4, 5))
    channels = random.choice((4, 8) if even else (1, 2, 3, 4, 5, 6, 8))
    inner = [n for n in only if n in BY_NAME]
    places = PLACES[:3] if any(BY_NAME[n].after is not unchanged for n in inner) else PLACES
    alone = (Block(random.choice(places), tuple((n, random.randrange(1000)) for n in inner)),)
    blocks = (alone if inner else ()) if only else _blocks(random, At(length, channels))
    while inner and not _fits(blocks, At(length, channels)):
        length, channels = random.choice((1, 2, 3, 4)), random.choice((1, 2, 3, 4, 6))
    inputs = [n for n in only if n.removeprefix("in: ") in SIGNATURE and n.startswith("in: ")]
    outputs = [n for n in only if n.removeprefix("out: ") in OUTPUT and n.startswith("out: ")]
    simple = bool(only) or random.random() < 0.4
    signature = (
        inputs[0].removeprefix("in: ")
        if inputs
        else "positional"
        if simple
        else _drawn(random, lambda: random.choice(list(SIGNATURE)))
    )
    output = outputs[0].removeprefix("out: ") if outputs else "scalar" if simple else random.choice(list(OUTPUT))
    return Case(
        seed=random.randrange(10**6),
        length=length,
        channels=channels,
        blocks=blocks,
        signature=signature,
        output=output,
        calls=_calls(random, mode, blocks, bool(only), even),
        optimizer=random.choice([o for o in OPTIMIZERS if not ("Adam" in o and _sparse(blocks))]),
        original=random.random() < 0.3,
    )


def _sparse(blocks: Sequence[Block]) -> bool:
    return any("sparse" in name for block in blocks for name, _ in block.pieces)


def sizes_behind(block: Block, at: At) -> At | None:
    """Sizes behind a block; None where one of its pieces does not fit."""
    for _ in range(2 if block.place == "twice" else 1):
        for name, _ in block.pieces:
            piece = BY_NAME[name]
            if not piece.when(at):
                return None
            at = piece.after(at)
    return at if at.length <= LONGEST and at.channels <= WIDEST else None


def _fits(blocks: Sequence[Block], at: At) -> bool:
    for block in blocks:
        behind = sizes_behind(block, at)
        if behind is None or (block.place == "twice" and behind != at):
            return False
        at = behind
    return True


def _drawn(random: Random, choose: Callable[[], str]) -> str:
    name = choose()
    while name in RARE and random.random() < 0.75:
        name = choose()
    return name


def _blocks(random: Random, at: At) -> tuple[Block, ...]:
    blocks: list[Block] = []
    for _ in range(random.choice((1, 1, 2, 2, 3))):
        pieces = []
        for _ in range(random.choice((1, 1, 2, 2, 3))):
            name = _drawn(random, lambda: random.choice(GROUPS[random.choice(list(GROUPS))]).name)
            pieces.append((name, random.randrange(1000)))
        block = Block(random.choice(PLACES), tuple(pieces))
        if _fits([*blocks, block], at):
            blocks.append(block)
    return tuple(blocks) or (Block("root", (("linear", 0),)),)


def _calls(random: Random, mode: str, blocks: Sequence[Block], alone: bool, even: bool) -> tuple[Call, ...]:
    pieces = [BY_NAME[n] for b in blocks for n, _ in b.pieces]
    changing = [i for i, p in enumerate(pieces) if p.change]
    trained = any(p.trained for p in pieces)
    first = random.choice((4, 8) if even else (1, 2, 3, 4, 5))
    if mode == "plans":
        return (Call(first),)
    if first < 4 and not even and random.random() < 0.02:
        first = 0
    count = 3 if alone or changing else random.choice((1, 1, 2, 2, 3))
    calls = [Call(first, step=random.random() < 0.7)]
    for _ in range(count - 1):
        rows = first if random.random() < 0.9 else random.choice((2, 3, 4, 6))
        training = random.random() < 0.9
        gradient = trained or random.random() < 0.95
        changes = tuple(i for i in changing if random.random() < 0.6)
        calls.append(Call(rows, training, gradient, random.random() < 0.7, changes))
    return tuple(calls)
