"""`Piece`: one feature of a random module, as the text that it adds to a program.

In every text ``PP`` is the piece's own prefix, ``CC`` and ``SS`` are the channels and the length of the activation
``h`` of shape ``[rows, SS, CC]``, ``MM`` is the path of the module that holds it, and ``<<a|b>>`` is one of the two.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random


@dataclass(frozen=True)
class At:
    """Sizes of the activation where a piece stands: ``[rows, length, channels]``; rows differ between calls."""

    length: int
    channels: int


def anywhere(at: At) -> bool:
    return True


def unchanged(at: At) -> At:
    return at


@dataclass(frozen=True)
class Piece:
    """One feature.

    Attributes:
        name: by which outcomes are counted.
        forward: statements that change ``h``.
        init: statements of ``__init__``.
        top: definitions in front of the module.
        change: statements that a training loop may run between two calls.
        start: statements that it runs before the first call, on the returned module.
        python: attributes of the module that are compared after each call.
        aux: what the loop adds to the loss.
        when: sizes that it needs.
        after: sizes behind it.
        trained: whether it needs a gradient: it cannot stand in a call under `torch.no_grad`.
    """

    name: str
    forward: str
    init: str = ""
    top: str = ""
    change: str = ""
    start: str = ""
    python: tuple[str, ...] = ()
    aux: str = ""
    when: Callable[[At], bool] = anywhere
    after: Callable[[At], At] = unchanged
    trained: bool = False

    def rendered(self, prefix: str, module: str, at: At, seed: int) -> Piece:
        """With all of its marks filled in."""
        random = Random(seed)

        def fill(text: str) -> str:
            text = re.sub(r"<<(.*?)>>", lambda m: random.choice(m[1].split("|")), text, flags=re.DOTALL)
            for mark, value in (("PP", prefix), ("CC", at.channels), ("SS", at.length), ("MM", module)):
                text = text.replace(mark, str(value))
            return text.strip("\n")

        return replace(
            self,
            forward=fill(self.forward),
            init=fill(self.init),
            top=fill(self.top),
            change=fill(self.change),
            start=fill(self.start),
            python=tuple(fill(p) for p in self.python),
            aux=fill(self.aux),
        )


def even_channels(at: At) -> bool:
    return at.channels % 2 == 0


def even_length(at: At) -> bool:
    return at.length % 2 == 0


def longer(at: At) -> bool:
    return at.length > 1


def wider(at: At) -> bool:
    return at.channels > 1


def both_longer(at: At) -> bool:
    return at.length > 1 and at.channels > 1
