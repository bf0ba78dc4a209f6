"""merge_windows: what is padded and cut back to the length that it had is never of another length.

Before::

    longer = aten.constant_pad_nd(labels, [0, 1], -100); shifted = aten.slice(longer, 1, 1, 17)
    before = aten.slice_scatter(aten.full([2, 16], 0), aten.slice(x, 1, 0, 15), 1, 1, 16)  # y[:, 1:] = x[:, :-1]
    c = aten.convolution(x, w, b, [1], [3], ...); causal = aten.slice(c, 2, 0, 16)      # x [batch, channels, 16]

After::

    shifted = aten.constant_pad_nd(labels, [-1, 1], -100)
    before = aten.constant_pad_nd(x, [1, -1], 0)
    causal = autopar.padded_convolution(x, w, b, [1], [3], [0], ...)

So are windows of what is padded (``F.pad(x, (2, 0)).unfold(1, 3, 1)``, `autopar.padded_windows`), zeros, reflections
and edges before a convolution, and gradients of all of these. A dim of another length is another factor, which no
split of the sequence reaches.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from autopar.ir.graph import computed, copy_graph, insert_call
from autopar.ir.module_outputs import pass_on
from autopar.ir.ops.sequence.halo import pads
from autopar.ir.ops.sequence.padded.convolution import (
    PAD_GRADIENTS,
    PADS,
    ZEROS,
    padded_convolution,
    padded_convolution_backward,
)
from autopar.ir.ops.sequence.padded.windows import padded_windows, padded_windows_backward
from autopar.ir.program import Program

aten = torch.ops.aten

_FORWARD, _BACKWARD = aten.convolution.default, aten.convolution_backward.default
_MODES = {target: mode for mode, targets in PADS.items() for target in targets}
"""Padding with what a tensor has, by how it does."""

_GRADIENTS = {
    target: grad for m, targets in PADS.items() for target, grad in zip(targets, PAD_GRADIENTS[m], strict=True)
}
_FOUND = {aten.constant_pad_nd.default, aten.slice.Tensor, aten.slice_backward.default, *_MODES}
_MOVES = (aten.permute.default, aten._to_copy.default)
"""What may stand between padding and a convolution."""


def merge_windows(program: Program) -> Program:
    """Make operators that keep a dim's length of pairs that change it and change it back; computes the same."""
    if not any(n.target in _FOUND for n in program.graph.graph.nodes):
        return program
    graph = copy_graph(program.graph)
    for form in (_unfolded, _unfolded_backward, _shift, _pad_of_convolution, _cut_of_convolution, _gradients):
        for node in list(graph.graph.nodes):
            form(graph.graph, node)
    return program.with_graph(graph)


@dataclass(frozen=True)
class _Ends:
    """Elements added to both ends of a dim, or taken from them where negative.

    Attributes:
        source: of what.
        dim: along which.
        low: before the first.
        high: behind the last.
        fill: what is added; None: nothing is.
    """

    source: fx.Node
    dim: int
    low: int
    high: int
    fill: Any = None

    @property
    def size(self) -> int:
        """Of the dim before."""
        return int(_value(self.source).shape[self.dim])

    def over(self, inner: _Ends) -> _Ends | None:
        """Both at once, ``inner`` first; None where that is something else."""
        both = []
        for first, second in ((inner.low, self.low), (inner.high, self.high)):
            if first < 0 < second:  # what has been taken does not come back
                return None
            both.append(first + second)
        fills = [e.fill for e in (inner, self) if e.fill is not None]
        if self.dim != inner.dim or any(
            f != fills[0] or isinstance(f, bool) != isinstance(fills[0], bool) for f in fills
        ):
            return None
        whole = inner.size
        if sum(max(-n, 0) for n in both) >= whole:  # all that is left is filling
            return None
        return _Ends(inner.source, self.dim, both[0], both[1], fills[0] if fills else None)


def _ends(node: Any) -> _Ends | None:
    """A node that pads or cuts one dim."""
    if not isinstance(node, fx.Node):
        return None
    args: Any = node.args
    if node.target is aten.slice.Tensor and args[4] == 1:
        return _Ends(args[0], args[1], -args[2], args[3] - _value(args[0]).shape[args[1]])
    if node.target is aten.slice_backward.default and args[5] == 1:
        return _Ends(args[0], args[2], args[3], args[1][args[2]] - args[4], 0)
    if node.target is aten.constant_pad_nd.default:
        padded = [d for d in _padding(node) if any(_padding(node)[d])]
        fill = args[2] if len(args) > 2 else 0
        return _Ends(args[0], padded[0], *_padding(node)[padded[0]], fill) if len(padded) == 1 else None
    if node.target is aten.slice_scatter.default and args[5] == 1 and _is_constant(args[0], node, args[1]):
        return _Ends(args[1], args[2], args[3], _value(node).shape[args[2]] - args[4], args[0].args[1])
    return _beside_constant(node) if node.target is aten.cat.default else None


def _beside_constant(node: fx.Node) -> _Ends | None:
    """A tensor beside equal numbers."""
    parts: Any = node.args[0]
    dim = int(node.args[1]) if len(node.args) > 1 else 0  # type: ignore[arg-type]
    if len(parts) != 2:
        return None
    for constant, other, first in ((parts[0], parts[1], True), (parts[1], parts[0], False)):
        if _is_constant(constant, node, other):
            size = _value(constant).shape[dim]
            return _Ends(other, dim, size * first, size * (not first), constant.args[1])
    return None


def _is_constant(constant: Any, node: fx.Node, other: Any) -> bool:
    """Whether a tensor has equal numbers, beside another one of its dtype that is none of these."""
    fine = constant.target is aten.full.default and other.target is not aten.full.default
    return fine and _value(other).dtype == _value(node).dtype and isinstance(constant.args[1], int | float | bool)


def _padding(node: fx.Node) -> dict[int, tuple[int, int]]:
    """What padding adds to both ends of each dim that it names."""
    numbers: Any = node.args[1]
    last = _value(node).ndim - 1
    return {last - i: (numbers[2 * i], numbers[2 * i + 1]) for i in range(len(numbers) // 2)}


def _shift(graph: fx.Graph, node: fx.Node) -> None:
    """A dim that is padded and cut, or cut and padded, to the length that it had: shifted, or as it was."""
    found = _ends(node)
    whole = found
    while found is not None and whole is not None and (inner := _ends(found.source)) is not None:
        found = found.over(inner)
        if found is not None and found.low + found.high == 0:
            whole = found
    if (
        whole is None
        or whole.low + whole.high != 0
        or (node.target is aten.constant_pad_nd.default and whole == _ends(node))
    ):
        return
    if whole.low == 0:
        pass_on(node, whole.source)
        node.replace_all_uses_with(whole.source)
        return
    numbers = pads(_value(node).ndim, whole.dim, whole.low, whole.high)
    _become(node, aten.constant_pad_nd.default, whole.source, numbers, whole.fill)


def _unfolded(graph: fx.Graph, node: fx.Node) -> None:
    """Windows of what is padded, one for each step of the tensor without the padding."""
    if node.target is not aten.unfold.default:
        return
    source, dim, size, step = node.args
    ends = _ends(source)
    if ends is None or ends.fill is None or not _covers(ends, dim, size, step):
        return
    _become(node, padded_windows, ends.source, ends.dim, size, step, ends.low, ends.high, ends.fill)


def _unfolded_backward(graph: fx.Graph, node: fx.Node) -> None:
    """Gradients of windows, from which that of the padding is cut; where they are added up, of each."""
    cut = _ends(node)
    if cut is None or max(cut.low, cut.high) > 0:
        return
    if cut.source.target is aten.unfold_backward.default:
        args: Any = cut.source.args
        grad, _, *numbers = args
        padded = replace(cut, source=node, low=-cut.low, high=-cut.high)
        if _covers(padded, *numbers):
            sizes = list(_value(node).shape)
            _become(node, padded_windows_backward, grad, sizes, cut.dim, *numbers[1:], padded.low, padded.high)
    elif cut.source.target is aten.add.Tensor and len(cut.source.users) == 1 and _adds_windows(cut.source):
        with graph.inserting_before(node):
            parts = [insert_call(graph, node, node.target, n, *node.args[1:]) for n in cut.source.all_input_nodes]
        _become(node, aten.add.Tensor, *parts)
        graph.erase_node(cut.source)  # a reader of sums below
        for part in parts:
            _unfolded_backward(graph, part)


def _adds_windows(node: fx.Node) -> bool:
    """Whether a sum has gradients of windows in it: of tensors alike, which nothing else reads."""
    a, b = node.args[:2]
    alike = isinstance(a, fx.Node) and isinstance(b, fx.Node) and a is not b and _value(a).shape == _value(b).shape
    if not alike or node.kwargs or any(len(n.users) > 1 for n in node.all_input_nodes):
        return False
    targets = {n.target for n in node.all_input_nodes}
    return aten.unfold_backward.default in targets or any(
        n.target is aten.add.Tensor and _adds_windows(n) for n in node.all_input_nodes
    )


def _covers(ends: _Ends, dim: Any, size: Any, step: Any) -> bool:
    """Whether there is a window for each step of a dim that is padded, none of which is beyond a neighbor."""
    whole = ends.size + ends.low + ends.high
    if ends.dim != dim % _value(ends.source).ndim or min(ends.low, ends.high) < 0 or size < step:
        return False
    return bool(step * ((whole - size) // step + 1) == ends.size and 2 * (size - step) <= ends.size)


@dataclass(frozen=True)
class _Convolution:
    """Numbers of a convolution.

    Attributes:
        stride: of each spatial dim, and so are the next ones.
        low: zeros before.
        high: zeros behind.
        dilation: step within the kernel.
        groups: of channels.
        mode: how it is padded.
    """

    stride: list[int]
    low: list[int]
    high: list[int]
    dilation: list[int]
    groups: int
    mode: str = ZEROS

    def padded(self, ends: dict[int, tuple[int, int]], mode: str) -> _Convolution | None:
        """With its argument padded before, by dim; None where that is something else."""
        low, high = list(self.low), list(self.high)
        # Of two kinds only one is the convolution's; what has been taken is no other's either.
        if mode != self.mode and (any([*low, *high]) or any(n < 0 for pair in ends.values() for n in pair)):
            return None
        for dim, numbers in ends.items():
            for side, n in zip((low, high), numbers, strict=True):
                # Of a batch or of channels; or zeros behind elements that have been taken away.
                if n and (dim < 2 or (n < 0 < side[dim - 2])):
                    return None
                if n:
                    side[dim - 2] += n
        return replace(self, low=low, high=high, mode=mode)

    def cut(self, ends: _Ends) -> _Convolution | None:
        """With its result cut; None where that is something else."""
        at = ends.dim - 2
        if at < 0 or self.stride[at] != 1:
            return None
        low, high = list(self.low), list(self.high)
        low[at] += ends.low
        high[at] += ends.high
        return None if self.mode != ZEROS and min(*low, *high) < 0 else replace(self, low=low, high=high)

    def keeps_length(self, x: torch.Tensor, weight: torch.Tensor) -> bool:
        """Whether some dim has as many outputs as elements, but for the stride; and none loses all that it has."""
        numbers = zip(x.shape[2:], weight.shape[2:], self.stride, self.low, self.high, self.dilation, strict=True)
        kept = [size == s * ((size + a + b - d * (k - 1) - 1) // s + 1) for size, k, s, a, b, d in numbers]
        left = [n - max(-a, 0) - max(-b, 0) for n, a, b in zip(x.shape[2:], self.low, self.high, strict=True)]
        other = self.mode != ZEROS
        return any(k and (other or a != b) for k, a, b in zip(kept, self.low, self.high, strict=True)) and min(left) > 0

    @property
    def args(self) -> tuple[Any, ...]:
        """As our operators take them."""
        return (self.stride, self.low, self.high, self.dilation, self.groups, self.mode)


def _numbers(node: fx.Node) -> _Convolution | None:
    """Of a convolution that is not transposed, or of its backward."""
    args: Any = node.args[4:] if node.target in (_BACKWARD, padded_convolution_backward) else node.args[3:]
    if node.target in (padded_convolution, padded_convolution_backward):
        return _Convolution(*args[:6])
    stride, padding, dilation, transposed, _, groups = args[:6]
    spatial = _value(node.args[2 if node.target is _BACKWARD else 1]).ndim - 2
    each, low, high, step = (
        [n[i] if len(n) > 1 else n[0] for i in range(spatial)] for n in (stride, padding, padding, dilation)
    )
    return None if transposed else _Convolution(each, low, high, step, groups)


def _padded_source(x: Any) -> tuple[fx.Node, list[fx.Node]] | None:
    """A padding with zeros or with what is there under a value, and what stands between them."""
    between: list[fx.Node] = []
    while isinstance(x, fx.Node) and _moves(x):
        between.insert(0, x)
        x = x.args[0]
    if not isinstance(x, fx.Node) or x.target not in (aten.constant_pad_nd.default, *_MODES):
        return None
    if x.target in _MODES:  # of dims in their order alone
        return (x, between) if all(n.target is not aten.permute.default for n in between) else None
    return (x, between) if len(x.args) < 3 or x.args[2] == 0 else None


def _as_seen(ends: dict[int, tuple[int, int]], between: list[fx.Node]) -> dict[int, tuple[int, int]]:
    """Padding by dim, behind permutations."""
    for node in between:
        if node.target is aten.permute.default:
            order: Any = node.args[1]
            ends = {d: ends[was] for d, was in enumerate(order) if was in ends}
    return ends


def _unpadded(graph: fx.Graph, before: fx.Node, pad: fx.Node, between: list[fx.Node]) -> Any:
    """What a convolution reads, without the padding."""
    found: Any = pad.args[0]
    with graph.inserting_before(before):
        for node in between:
            made = graph.call_function(node.target, (found, *node.args[1:]), node.kwargs)  # type: ignore[arg-type]
            made.meta = dict(node.meta)
            made.meta["val"] = _cropped(node, between, pad)
            found = made
    return found


def _pad_of_convolution(graph: fx.Graph, node: fx.Node) -> None:
    """Zeros before a convolution are its own."""
    numbers = _numbers(node) if node.target is _FORWARD else None
    found = _padded_source(node.args[0]) if numbers is not None else None
    if numbers is None or found is None:
        return
    pad, between = found
    whole = numbers.padded(_as_seen(_padding(pad), between), _MODES.get(pad.target, ZEROS))
    if whole is None or not whole.keeps_length(_cropped(node.args[0], between, pad), _value(node.args[1])):
        return
    x = _unpadded(graph, node, pad, between)
    _become(node, padded_convolution, x, *node.args[1:3], *whole.args)


def _turned(x: Any, alone: bool = False) -> tuple[Any, list[fx.Node]]:
    """What is under permutations, and these; ``alone``: as far as nothing else reads it."""
    between: list[fx.Node] = []
    while isinstance(x, fx.Node) and x.target is aten.permute.default and not (alone and len(x.users) > 1):
        between.insert(0, x)
        x = x.args[0]
    return x, between


def _cut_of_convolution(graph: fx.Graph, node: fx.Node) -> None:
    """Outputs that are cut off are not computed."""
    ends = _ends(node) if node.target is aten.slice.Tensor else None
    source, between = _turned(node.args[0], alone=True) if ends is not None else (None, [])
    if ends is None or not isinstance(source, fx.Node) or len(source.users) > 1:
        return
    orders: list[Any] = [n.args[1] for n in between]
    for order in reversed(orders):
        ends = replace(ends, dim=order[ends.dim])
    numbers = _numbers(source) if source.target in (_FORWARD, padded_convolution) else None
    whole = None if numbers is None else numbers.cut(ends)
    if whole is None or not whole.keeps_length(_value(source.args[0]), _value(source.args[1])):
        return
    arguments = (*source.args[:3], *whole.args)
    if not orders:
        _become(node, padded_convolution, *arguments)
        return
    with graph.inserting_before(node):
        made = insert_call(graph, source, padded_convolution, *arguments)
        for turned, order in zip(between[:-1], orders[:-1], strict=True):
            made = insert_call(graph, turned, aten.permute.default, made, order)
    _become(node, aten.permute.default, made, orders[-1])


def _gradients(graph: fx.Graph, node: fx.Node) -> None:
    """The same of a convolution's gradients."""
    numbers = _numbers(node) if node.target is _BACKWARD else None
    if numbers is None:
        return
    grad, x, weight, bias = node.args[:4]
    mask: Any = node.args[-1]
    chain, last, (given, turns) = list[fx.Node](), None, _turned(grad)
    ends = _ends(given)
    if ends is not None and ends.fill == 0 and min(ends.low, ends.high) >= 0:
        (dim,) = _as_seen({ends.dim: (0, 0)}, turns)
        cut = numbers.cut(replace(ends, dim=dim, low=-ends.low, high=-ends.high))
        numbers, given, turns = (numbers, grad, []) if cut is None else (cut, ends.source, turns)
    else:
        given, turns = grad, []
    shown, found = _value(x), _padded_source(x)
    if found is not None:
        pad, between = found
        padded = numbers.padded(_as_seen(_padding(pad), between), _MODES.get(pad.target, ZEROS))
        chain, last = _gradient_of_padding(node, pad) if mask[0] else ([], None)
        if padded is not None and (last is not None or not mask[0]):
            numbers, shown = padded, _cropped(x, between, pad)
        else:
            found = None
    if not numbers.keeps_length(shown, _value(weight)):
        return
    if found is not None:
        x = _unpadded(graph, node, *found)
    with graph.inserting_before(node):
        for turn in turns:
            given = insert_call(graph, turn, aten.permute.default, given, turn.args[1])
    _become(node, padded_convolution_backward, given, x, weight, bias, *numbers.args, mask)
    if found is not None and last is not None:
        for moved in chain:
            moved.meta["val"] = node.meta["val"][0] if moved is chain[0] else _again(moved, _value(moved.args[0]))
        pass_on(last, chain[-1])
        last.replace_all_uses_with(chain[-1])


def _gradient_of_padding(node: fx.Node, pad: fx.Node) -> tuple[list[fx.Node], fx.Node | None]:
    """From a convolution's gradient to where it is cut as its argument was padded; None if it is used otherwise."""
    chain = [u for u in node.users if u.args[1] == 0]
    wanted = {d: (-a, -b) for d, (a, b) in _padding(pad).items() if a or b}
    while chain and len(chain[-1].users) == 1:
        (user,) = chain[-1].users
        if _moves(user):
            chain.append(user)
            continue
        if pad.target in _MODES:
            same = user.target is _GRADIENTS[pad.target] and user.args[0] is chain[-1] and user.args[1:] == pad.args
            return chain, user if same else None
        ends = _ends(user)
        cut = {} if ends is None else {ends.dim: (ends.low, ends.high)}
        if user.target is aten.constant_pad_nd.default:
            cut = {d: n for d, n in _padding(user).items() if any(n)}
        return chain, user if cut == wanted and user.args[0] is chain[-1] else None
    return chain, None


def _cropped(node: Any, between: list[fx.Node], pad: fx.Node) -> torch.Tensor:
    """What one of the nodes behind a padding is without it."""
    value = _value(pad.args[0])
    for each in between:
        value = _again(each, value)
        if each is node:
            break
    return value


def _again(node: Any, value: torch.Tensor) -> torch.Tensor:
    """A permutation or a cast, of another tensor."""
    with torch.no_grad():
        return value.permute(node.args[1]) if node.target is aten.permute.default else value.to(_value(node).dtype)


def _become(node: fx.Node, target: Any, *args: Any) -> None:
    """Make a node another call, which makes memory of its own where the old one was a view."""
    node.target, node.args, node.kwargs = target, args, {}
    node.meta["val"] = computed(node)


def _moves(node: fx.Node) -> bool:
    """Whether a node does nothing but permute or cast."""
    same = node.target in _MOVES and _value(node).device == _value(node.args[0]).device
    return same and (node.target is aten.permute.default or set(node.kwargs) <= {"dtype", "memory_format"})


def _value(node: Any) -> torch.Tensor:
    value: torch.Tensor = node.meta["val"]
    return value
