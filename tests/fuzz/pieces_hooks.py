"""Pieces with hooks on modules and parametrizations."""

from tests.fuzz.piece import Piece

LINEAR = "self.PPl = nn.Linear(CC, CC)"
CALL = "h = <<self.PPl(h)|torch.tanh(self.PPl(h))>>"

PIECES = (
    Piece(
        "forward hook",
        CALL,
        LINEAR + "\nself.PPl.register_forward_hook(<<lambda m, i, o: o * 2|lambda m, i, o: o + i[0]|"
        "lambda m, i, o: None>>)",
    ),
    Piece(
        "forward pre-hook",
        CALL,
        LINEAR + "\nself.PPl.register_forward_pre_hook(<<lambda m, i: (i[0] + 1,)|lambda m, i: i[0] * 0.5|"
        "lambda m, i: None>>)",
    ),
    Piece(
        "forward hook with kwargs",
        "h = self.PPl(input=h)",
        LINEAR + "\nself.PPl.register_forward_pre_hook(lambda m, i, k: (i, {'input': k['input'] * 2}), "
        "with_kwargs=True)",
    ),
    Piece(
        "backward hook",
        CALL,
        LINEAR + "\nself.PPl.register_full_backward_hook(<<lambda m, i, o: (i[0] * 2,)|lambda m, i, o: (-i[0],)|"
        "lambda m, i, o: None>>)",
    ),
    Piece(
        "backward pre-hook",
        CALL,
        LINEAR + "\nself.PPl.register_full_backward_pre_hook(<<lambda m, o: (o[0] * 0.5,)|"
        "lambda m, o: (o[0].clamp(-1e-3, 1e-3),)>>)",
    ),
    Piece(
        "recording forward hook",
        CALL,
        LINEAR + "\nself.PPseen = {}\n"
        "self.PPl.register_forward_hook(lambda m, i, o: self.PPseen.update(out=o.detach().mean()))",
        python=("PPseen",),
    ),
    Piece(
        "recording backward hook",
        CALL,
        LINEAR + "\nself.PPseen = []\n"
        "self.PPl.register_full_backward_hook(lambda m, i, o: self.PPseen.append(o[0].detach().norm()))",
        python=("PPseen",),
    ),
    Piece(
        "forward hook that counts",
        CALL,
        LINEAR + "\nself.PPn = 0\nself.PPl.register_forward_hook(lambda m, i, o: setattr(self, 'PPn', self.PPn + 1))",
        python=("PPn",),
    ),
    Piece(
        "forward hook added later",
        CALL,
        LINEAR,
        change="MM.PPl.register_forward_hook(lambda m, i, o: o * 2)",
    ),
    Piece(
        "pre-hook added later",
        CALL,
        LINEAR,
        change="MM.PPl.register_forward_pre_hook(lambda m, i: (i[0] * 0.5,))",
    ),
    Piece(
        "backward hook added later",
        CALL,
        LINEAR,
        change="MM.PPl.register_full_backward_hook(lambda m, i, o: (i[0] * 3,))",
    ),
    Piece(
        "hook removed later",
        CALL,
        LINEAR + "\nself.PPk = self.PPl.register_forward_hook(lambda m, i, o: o * 2)",
        change="MM.PPk.remove()",
    ),
    Piece(
        "hook on the root",
        "h = h * 2",
        start="model.register_forward_hook(<<lambda m, i, o: None|lambda m, i, o: o>>)",
    ),
    Piece(
        "pre-hook on the module itself",
        "h = h * self.PPs",
        "self.PPs = 1.0\nself.register_forward_pre_hook(lambda m, i: setattr(m, 'PPs', m.PPs * 0.5))",
        python=("PPs",),
    ),
    Piece(
        "parameter hook",
        CALL,
        LINEAR,
        start="MM.PPl.weight.register_hook(lambda g: g * 0.5)",
    ),
    Piece(
        "post-accumulate hook",
        CALL,
        LINEAR,
        start="MM.PPl.weight.register_post_accumulate_grad_hook(PPdouble)",
        top="def PPdouble(p):\n    p.grad.mul_(2)",
    ),
    Piece("weight norm", CALL, "self.PPl = nn.utils.parametrizations.weight_norm(nn.Linear(CC, CC))"),
    Piece("old weight norm", CALL, "self.PPl = nn.utils.weight_norm(nn.Linear(CC, CC))"),
    Piece("spectral norm", CALL, "self.PPl = nn.utils.parametrizations.spectral_norm(nn.Linear(CC, CC))"),
    Piece("old spectral norm", CALL, "self.PPl = nn.utils.spectral_norm(nn.Linear(CC, CC))"),
    Piece("orthogonal", CALL, "self.PPl = nn.utils.parametrizations.orthogonal(nn.Linear(CC, CC))"),
    Piece(
        "own parametrization",
        CALL,
        LINEAR + "\nnn.utils.parametrize.register_parametrization(self.PPl, 'weight', PPSymmetric())",
        top="""
class PPSymmetric(nn.Module):
    def forward(self, w):
        return w.triu() + w.triu(1).transpose(-1, -2)
""",
    ),
    Piece(
        "global forward of a child overridden",
        CALL,
        LINEAR + "\nself.PPl.forward = lambda x, old=self.PPl.forward: old(x) * 2",
    ),
)
