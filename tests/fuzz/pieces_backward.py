"""Pieces whose backward pass is not that of their forward operators."""

from tests.fuzz.piece import Piece, wider

FUNCTION = """
class PPFn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, {arguments}):
{forward}

    @staticmethod{once}
    def backward(ctx, {gradients}):
{backward}
"""


def function(arguments: str, forward: str, gradients: str, backward: str, once: bool = False) -> str:
    """The text of an autograd function."""

    def indent(text: str) -> str:
        return "\n".join("        " + line for line in text.strip("\n").split("\n"))

    return FUNCTION.format(
        arguments=arguments,
        forward=indent(forward),
        gradients=gradients,
        backward=indent(backward),
        once="\n    @torch.autograd.function.once_differentiable" if once else "",
    )


PIECES = (
    Piece(
        "reversal",
        "h = PPFn.apply(h, <<0.5|1.0|2>>)",
        top=function("x, factor", "ctx.factor = factor\nreturn x.view_as(x)", "g", "return -ctx.factor * g, None"),
    ),
    Piece(
        "straight through",
        "h = h + PPFn.apply(h)",
        top=function("x", "return <<torch.round(x * 4) / 4|torch.sign(x)|(x > 0).to(x.dtype)>>", "g", "return g"),
    ),
    Piece(
        "clamped gradient",
        "h = PPFn.apply(h)",
        top=function("x", "return <<x.clone()|x * 1|x.view_as(x)>>", "g", "return g.clamp(-1e-3, 1e-3)"),
    ),
    Piece(
        "saved tensors",
        "h = PPFn.apply(h)",
        top=function(
            "x",
            "y = torch.tanh(x)\nctx.save_for_backward(<<x, y|y, x>>)\nreturn y",
            "g",
            "x, y = ctx.saved_tensors\nreturn g * 0.3 * <<(1 - y * y)|torch.cos(x)>>",
        ),
    ),
    Piece(
        "setup_context",
        "h = PPFn.apply(h, <<2|3.0>>)",
        top="""
class PPFn(torch.autograd.Function):
    @staticmethod
    def forward(x, power):
        return x.abs() ** power

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, ctx.power = inputs
        ctx.save_for_backward(x)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * ctx.power * 0.1 * torch.sign(x), None
""",
    ),
    Piece(
        "once_differentiable",
        "h = PPFn.apply(h)",
        top=function(
            "x",
            "ctx.save_for_backward(x)\nreturn torch.sin(x)",
            "g",
            "(x,) = ctx.saved_tensors\nreturn g * 0.5 * torch.cos(x)",
            once=True,
        ),
    ),
    Piece(
        "several inputs and outputs",
        "PPa, PPb = PPFn.apply(h, self.PPw, 3)\nh = PPa + <<PPb|0.5 * PPb|PPb.detach()>>",
        init="self.PPw = nn.Parameter(torch.randn(CC))",
        top=function(
            "x, w, k",
            "ctx.save_for_backward(x, w)\nctx.k = k\nreturn x * w, x + w * k",
            "ga, gb",
            "x, w = ctx.saved_tensors\nreturn ga * w * 0.5 + gb, (ga * x + gb * ctx.k * 2).sum((0, 1)), None",
        ),
    ),
    Piece(
        "non-differentiable output",
        "PPa, PPi = PPFn.apply(h)\nh = PPa * (1 + PPi.to(h.dtype).unsqueeze(-1))",
        top=function(
            "x",
            "i = x.argmax(-1)\nctx.mark_non_differentiable(i)\nreturn x * 2, i",
            "g, _",
            "return g * 3",
        ),
    ),
    Piece(
        "custom linear",
        "h = PPFn.apply(h, self.PPw, <<self.PPb|None>>)",
        init="self.PPw = nn.Parameter(torch.randn(CC, CC) * 0.5)\nself.PPb = nn.Parameter(torch.randn(CC))",
        top=function(
            "x, w, b",
            "ctx.save_for_backward(x, w)\ny = x @ w.t()\nreturn y if b is None else y + b",
            "g",
            "x, w = ctx.saved_tensors\n"
            "flat = g.reshape(-1, g.shape[-1])\n"
            "gw = 2 * flat.t() @ x.reshape(-1, x.shape[-1]) if ctx.needs_input_grad[1] else None\n"
            "gb = flat.sum(0) if ctx.needs_input_grad[2] else None\n"
            "return 0.5 * g @ w, gw, gb",
        ),
    ),
    Piece(
        "gradient of one input only",
        "h = PPFn.apply(h, torch.tanh(h))",
        top=function("x, y", "ctx.set_materialize_grads(False)\nreturn x * 2 + y", "g", "return None, g"),
    ),
    Piece(
        "nested function",
        "h = PPOuter.apply(h)",
        top=function("x", "return x.exp().clamp(max=5)", "g", "return g * 0.1")
        + """

class PPOuter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            inner = PPFn.apply(torch.tanh(leaf))
        ctx.save_for_backward(leaf, inner)
        return inner.detach()

    @staticmethod
    def backward(ctx, g):
        leaf, inner = ctx.saved_tensors
        return torch.autograd.grad(inner, leaf, g)[0]
""",
    ),
    Piece(
        "mark_dirty",
        "h = PPFn.apply(h * 1.0)",
        top=function("x", "x.mul_(2)\nctx.mark_dirty(x)\nreturn x", "g", "return g * 0.7"),
    ),
    Piece(
        "double backward of a function",
        "PPz = self.PPl(h)\nPPg, = torch.autograd.grad(PPFn.apply(PPz).sum(), PPz, create_graph=True)\nh = h + PPg",
        init="self.PPl = nn.Linear(CC, CC)",
        top=function("x", "ctx.save_for_backward(x)\nreturn x ** 3", "g", "(x,) = ctx.saved_tensors\nreturn g * x * x"),
        trained=True,
    ),
    Piece("detached straight through", "h = h + (torch.round(h) - h).detach() * 0.5"),
    Piece(
        "tensor hook",
        "h = h * 1.5\nif h.requires_grad:\n    h.register_hook(<<lambda g: g * 0.5|lambda g: g.clamp(-1e-3, 1e-3)|"
        "lambda g: -g|lambda g: g / (1 + g.norm())>>)",
    ),
    Piece(
        "tensor hook on a value used twice",
        "PPa = self.PPl(h)\nif PPa.requires_grad:\n    PPa.register_hook(lambda g: g * 2)\nh = PPa + torch.tanh(PPa)",
        init="self.PPl = nn.Linear(CC, CC)",
    ),
    Piece(
        "two tensor hooks",
        "h = h + 0\nif h.requires_grad:\n    h.register_hook(lambda g: g * 2)\n    h.register_hook(lambda g: g + 1e-3)",
    ),
    Piece(
        "removed tensor hook",
        "h = h * 1.5\nif h.requires_grad:\n    PPk = h.register_hook(lambda g: g * 0.5)\n    PPk.remove()",
    ),
    Piece(
        "recording tensor hook",
        "h = h * 1.5\nif h.requires_grad:\n    h.register_hook(lambda g: self.PPseen.append(g.detach().norm()))",
        init="self.PPseen = []",
        python=("PPseen",),
    ),
    Piece(
        "tensor hook on a parameter in forward",
        "PPw = self.PPl.weight * 1.0\nif PPw.requires_grad:\n    PPw.register_hook(lambda g: g * 0.25)\n"
        "h = F.linear(h, PPw)",
        init="self.PPl = nn.Linear(CC, CC, bias=False)",
    ),
    Piece(
        "gradient scaled by a buffer",
        "h = h * 1.0\nif h.requires_grad:\n    h.register_hook(lambda g: g * self.PPs)",
        init="self.register_buffer('PPs', torch.tensor(0.5))",
    ),
    Piece(
        "rotated channels with own gradient",
        "h = PPFn.apply(h, 1)",
        top=function("x, n", "ctx.n = n\nreturn x.roll(n, -1)", "g", "return g.roll(-ctx.n, -1) * 2, None"),
        when=wider,
    ),
)
