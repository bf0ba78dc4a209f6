"""What goes into a random module and what comes out: signatures, calls and outputs of every kind."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tests.fuzz.piece import Piece

PLAIN = "<<h.square().mean()|h.logsumexp(-1).mean()|h.tanh().sum()|F.cross_entropy(h.flatten(0, 1), h.detach().flatten(0, 1).argmax(-1))>>"
"""A scalar of the last activation."""

TREE = """
def loss_of(out):
    return sum(t.square().mean() for _, t in tensors_of(out) if t.is_floating_point())
"""


@dataclass(frozen=True)
class Signature:
    """How a module is called.

    Attributes:
        name: by which outcomes are counted.
        parameters: of ``forward``, behind ``self``.
        take: statements that make ``h`` of them.
        call: arguments of a call; drawn anew for each.
        batch: the first call's arguments as a tuple or dict.
        prepare: statements in front of a call, ``ROWS`` of which are its rows and ``II`` its number.
        top: definitions in front of the module.
    """

    name: str
    parameters: str
    take: str
    call: str
    batch: str
    prepare: str = ""
    top: str = ""

    def rendered(self, seed: int) -> Signature:
        return replace(self, take=filled(self.take, seed), parameters=filled(self.parameters, seed))


@dataclass(frozen=True)
class Output:
    """What a module returns.

    Attributes:
        name: by which outcomes are counted.
        finish: last statements of ``forward``.
        loss: what the loop makes of ``out``.
        top: definitions in front of the module.
        several: not one scalar alone carries gradients.
    """

    name: str
    finish: str
    loss: str
    top: str = ""
    several: bool = False

    def rendered(self, seed: int) -> Output:
        return replace(self, finish=filled(self.finish, seed), loss=filled(self.loss, seed))


def filled(text: str, seed: int) -> str:
    """A text with its choices made."""
    return Piece("", text).rendered("", "", _NOWHERE, seed).forward


class _Nowhere:
    length, channels = "SS", "CC"


_NOWHERE: Piece | object = _Nowhere()

Y = "y = randn(II + 50, ROWS, SS, CC)"
RECORD = "@dataclasses.dataclass\nclass Inputs:\n    x: torch.Tensor\n    y: torch.Tensor | None = None\n    scale: float = 1.0"
PAIR = "Pair = collections.namedtuple('Pair', ('x', 'y'))"

SIGNATURES = (
    Signature("positional", "x", "h = x", "x", "(x,)"),
    Signature("keyword", "x, y", "h = x * y", "x=x, y=y", "{'x': x, 'y': y}", Y),
    Signature("positional and keyword", "x, y", "h = x - y", "x, y=y", "(x, y)", Y),
    Signature("default", "x, scale=<<2.0|3>>", "h = x * scale", "<<x|x, scale=0.5|x, 0.25>>", "(x,)"),
    Signature("annealed float", "x, scale", "h = x * scale", "x, <<0.1|0.2|0.3>>", "(x, 0.5)"),
    Signature("annealed float by keyword", "x, *, scale=1.0", "h = x * scale", "x, scale=<<0.1|0.2|0.3>>",
              "{'x': x, 'scale': 0.5}"),
    Signature("positional-only", "x, y, /, scale=1.0", "h = (x + y) * scale", "x, y<<|, scale=2.0>>", "(x, y)", Y),
    Signature("keyword-only", "x, *, y", "h = x + 2 * y", "x, y=y", "{'x': x, 'y': y}", Y),
    Signature("variable positional", "x, *more", "h = x\nfor t in more:\n    h = h + t", "x<<|, y|, y, 2 * y>>", "(x, y)", Y),
    Signature("variable keyword", "x, **more", "h = x\nfor k in more:\n    h = h * more[k]", "x<<|, y=y|, z=y, y=2 * y>>",
              "{'x': x, 'y': y}", Y),
    Signature("all kinds", "x, /, y=None, *more, flag=False, **named",
              "h = x if y is None else x + y\nfor t in more:\n    h = h * t\nif flag:\n    h = -h\n"
              "for k in sorted(named):\n    h = h + named[k]",
              "x, <<y|y, y, flag=True|y, z=y|y=y, flag=True, a=0.5>>", "(x, y)", Y),
    Signature("dict", "batch", "h = batch['x'] + batch['y']", "<<{'x': x, 'y': y}|{'y': y, 'x': x}>>",
              "({'x': x, 'y': y},)", Y),
    Signature("dict that is changed", "batch", "h = batch.pop('x') + batch['y']\nbatch['seen'] = True", "{'x': x, 'y': y}",
              "({'x': x, 'y': y},)", Y),
    Signature("default dict", "batch", "h = batch['x'] + batch['z']",
              "collections.defaultdict(float, x=x, y=y)", "(collections.defaultdict(float, x=x, y=y),)", Y),
    Signature("dataclass", "inputs", "h = inputs.x * inputs.scale\nif inputs.y is not None:\n    h = h + inputs.y",
              "Inputs(x<<|, y|, y, 0.5>>)", "(Inputs(x, y),)", Y, RECORD),
    Signature("named tuple", "pair", "h = pair.x + pair.y", "Pair(x, y)", "(Pair(x, y),)", Y, PAIR),
    Signature("nested", "batch", "h = batch['a'][0] + batch['a'][1]['y'] * batch['b']",
              "{'a': [x, {'y': y}], 'b': <<2|0.5>>}", "({'a': [x, {'y': y}], 'b': 2},)", Y),
    Signature("None and strings", "x, y=None, mode='sum'", "h = x if y is None else x + y\nif mode == 'double':\n    h = h * 2",
              "x, <<None|y>>, <<'sum'|mode='double'>>", "(x, None, 'sum')", Y),
    Signature("flag", "x, flag=False", "h = -x if flag else x", "x, <<flag=True|False>>", "(x, True)"),
    Signature("integer that changes", "x, n=0", "h = x * (1 + n) / (1 + n % 3)", "x, n=II", "(x, 3)"),
    Signature("the same tensor twice", "x, y", "h = x + 2 * y", "x, x", "(x, x)"),
    Signature("input written", "x", "x.mul_(2)\nh = x + 1", "x", "(x,)"),
    Signature("strided input", "x", "h = x", "x.transpose(1, 2).contiguous().transpose(1, 2)",
              "(x.transpose(1, 2).contiguous().transpose(1, 2),)"),
    Signature("expanded input", "x, y", "h = x + y", "x, y[:1].expand(ROWS, SS, CC)", "(x, y[:1].expand(ROWS, SS, CC))", Y),
    Signature("part of a tensor", "x, y", "h = x + y", "x, torch.cat([y, y], 1)[:, 1:SS + 1]",
              "(x, torch.cat([y, y], 1)[:, 1:SS + 1])", Y),
    Signature("scalar tensor", "x, t", "h = x * t", "x, torch.tensor(<<0.5|2.0>>, dtype=torch.float64)",
              "(x, torch.tensor(0.5, dtype=torch.float64))"),
    Signature("mask", "x, mask", "h = x.masked_fill(~mask, 0.0)", "x, y > 0", "(x, y > 0)", Y),
    Signature("list", "xs", "h = sum(xs)", "[x, y<<|, x>>]", "([x, y],)", Y),
    Signature("object", "opts, x", "h = x * opts.scale", "types.SimpleNamespace(scale=<<0.5|2.0>>), x",
              "(types.SimpleNamespace(scale=0.5), x)"),
    Signature("dtype and device", "x, dtype=None", "h = x.to(dtype or x.dtype)", "x, <<torch.float64|None>>", "(x, torch.float64)"),
    Signature("function", "x, f=torch.tanh", "h = f(x)", "x<<|, torch.sigmoid>>", "(x,)"),
)  # fmt: skip

DATACLASS = "@dataclasses.dataclass\nclass Result:\n    loss: torch.Tensor\n    h: torch.Tensor\n    note: str = 'none'"
RESULT = "Result = collections.namedtuple('Result', ('loss', 'h'))"
DIFFERENT = f"one = {PLAIN}\ntwo = h.abs().mean()\n"

OUTPUTS = (
    Output("scalar", f"return {PLAIN}", "out"),
    Output("loss and tensor", f"return {PLAIN}, h", "out[0]"),
    Output("tensor and loss", f"return h, {PLAIN}", "out[1]"),
    Output("dict", f"return {{'loss': {PLAIN}, 'logits': h}}", "out['loss']"),
    Output("ordered dict", f"return collections.OrderedDict(loss={PLAIN}, logits=h)", "out['loss']"),
    Output("default dict of output", f"return collections.defaultdict(list, loss={PLAIN}, logits=h)", "out['loss']"),
    Output("dataclass of output", f"return Result({PLAIN}, h<<|, 'some'>>)", "out.loss", DATACLASS),
    Output("named tuple of output", f"return Result({PLAIN}, h)", "out.loss", RESULT),
    Output("constants of output", f"return {{'loss': {PLAIN}, 'n': 3, 'name': 'x', 'none': None, 'pi': 3.14, 'ok': True}}", "out['loss']"),
    Output("one tensor", "return h", "<<out.square().mean()|out.sum()|F.log_softmax(out, -1)[..., 0].mean()>>", several=True),
    Output("two tensors", "return h, h.tanh().<<sum(1)|mean(0)>>", "out[0].square().mean() + out[1].sum()", several=True),
    Output("nested tensors", "return {'a': [h, {'b': h.mean(1)}], 'c': (h * 2,)}", "loss", TREE, several=True),
    Output("several scalars", DIFFERENT + "return {'one': one, 'two': two}", "<<out['one'] + 0.5 * out['two']|out['two']|"
           "out['one'] * out['two']>>", several=True),
    Output("loss and scale", f"return {{'scale': self.scale.exp(), 'loss': {PLAIN}}}", "out['loss'] + 0.1 * out['scale']", several=True),
    Output("list of losses", DIFFERENT + "return [one, two]", "sum(out)", several=True),
    Output("loss and detached scalars", f"return {{'acc': (h.detach() > 0).double().mean(), 'loss': {PLAIN}}}", "out['loss']"),
    Output("scalar and tensor in the loss", DIFFERENT + "return two, h", "out[0] + out[1].square().mean()", several=True),
    Output("loss of one element", f"return ({PLAIN}).reshape(1)", "out.sum()", several=True),
    Output("integers of output", f"return {PLAIN}, h.argmax(-1), (h > 0)", "out[0]"),
    Output("input of output", f"return {PLAIN}, h0", "out[0]"),
    Output("parameter of output", f"return {PLAIN}, self.last.weight", "out[0]"),
    Output("buffer of output", f"return {PLAIN}, self.seen", "out[0]"),
    Output("the same tensor twice of output", f"loss = {PLAIN}\nreturn loss, loss", "out[0]"),
    Output("view of output", f"return {PLAIN}, h.transpose(1, 2), h[:, 0]", "out[0]"),
    Output("loss per row", "return h.square().mean((1, 2))", "out.mean()", several=True),
    Output("object of output", f"return types.SimpleNamespace(loss={PLAIN})", "out.loss"),
)  # fmt: skip
