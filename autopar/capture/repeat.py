"""`abridge`: the program of a deep model, captured from a model with fewer of its alike blocks.

Two and three blocks are captured. What the third adds to the graph is what every further one would add, if it adds just
the operators of the block in the middle and nothing changes elsewhere, which is checked.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace
from fnmatch import fnmatchcase

from torch import nn

from autopar.capture.fewer_layers import Shortened, shorten
from autopar.errors import AutoparError
from autopar.ir.graph import module_path
from autopar.ir.program import SHORT, Program, RepeatedLayers
from autopar.sharding.dims import analyze
from autopar.sharding.layer_classes import layer_classes

logger = logging.getLogger("autopar")


def abridge(
    model: nn.Module,
    make: Callable[[nn.Module], Program],
    pins: Iterable[str] = (),
    say: Callable[[str], None] = logger.info,
) -> Program:
    """The program of a model; where its blocks are proven alike, one of three blocks that knows of the others.

    Args:
        model: the whole model.
        make: captures a model.
        pins: names or patterns of tensors and modules whose layout is decided; they must not tell blocks apart.
        say: called with what is captured, and why.
    """
    # Three blocks: the first, the last, and one in the middle that stands for all others.
    short = shorten(model, SHORT)
    reason = short.reason or _told_apart(model, short, pins)
    if not reason:
        assert short.layers is not None
        alike = (short.layers - short.lead) // short.period
        say(f"capturing {short.lead + SHORT * short.period} of the {short.layers} blocks of {short.path}")
        try:
            three, two = make(short.model), make(shorten(model, SHORT - 1).model)
        except AutoparError as e:  # the whole model fails in the same way, or it does not
            reason = f"three blocks alone fail: {e}"
        else:
            repeat = RepeatedLayers(short.path, alike, two, short.lead, short.period)
            reason = _differs(three, repeat)
            if not reason:
                return replace(three, repeat=repeat)
    say(f"capturing the whole model: {reason}")
    return make(model)


def _told_apart(model: nn.Module, short: Shortened, pins: Iterable[str]) -> str:
    """A pin that holds for some of the alike blocks only."""
    alike: dict[tuple[int, str], list[str]] = defaultdict(list)
    for name in (name for named in (model.named_parameters(), model.named_modules()) for name, _ in named):
        number, _, rest = name.removeprefix(f"{short.path}.").partition(".")
        if name.startswith(f"{short.path}.") and int(number) >= short.lead:
            alike[(int(number) - short.lead) % short.period, rest].append(name)
    for pattern in pins:
        for names in alike.values():
            if len({fnmatchcase(name, pattern.partition(":")[0]) for name in names}) > 1:
                return f"the pin {pattern!r} holds for some blocks only"
    return ""


def _differs(three: Program, repeat: RepeatedLayers) -> str:
    """Why the third block does not stand for further ones; empty: it does."""
    two = repeat.shorter
    # By layer class: the search has one variable for each, and scales it by how often it occurs.
    classes, less = (layer_classes(p, analyze(p)) for p in (three, two))
    if classes.members.keys() != less.members.keys() or not two.structure.keys() <= three.structure.keys():
        return "with two blocks there are other operators than with three"
    owner = {n: module_path(n) for n in three.sources if module_path(n)}
    inputs = zip(three.placeholders, three.inputs, strict=True)
    owner.update({n: i.name for n, i in inputs if i.kind in ("parameter", "buffer")})
    # What the third block adds to a class must be what the middle block has of it; else there is something (an operator
    # on all layers at once, say) that does not grow with the blocks.
    for key, nodes in classes.members.items():
        if any(n in owner for n in nodes):  # sums of gradients belong to no module
            added = len(nodes) - len(less.members[key])
            expected = sum(repeat.block(owner[n])[0] == 1 for n in nodes)
            if added != expected:
                return f"a block adds {added} of {key}, of which the one in the middle has {expected}"
    return ""
