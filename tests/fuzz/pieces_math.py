"""Pieces of linear algebra, transforms, higher-order operators, and regions of another gradient mode."""

from tests.fuzz.piece import At, Piece, longer, wider

SQUARE = "PPa = h.transpose(1, 2) @ h / 4 + 2 * torch.eye(CC, dtype=h.dtype)\n"
"""A well-conditioned matrix of the channels for each row."""

ALGEBRA = (
    Piece("einsum", "h = torch.einsum('<<bsc,cd->bsd|bsc,dc->bsd>>', h, self.PPw)", "self.PPw = nn.Parameter(torch.randn(CC, CC))"),
    Piece("einsum of three", "h = torch.einsum('bsc,btc,btd->bsd', h, h.tanh(), h) * 0.1"),
    Piece("einsum over rows", "h = h + torch.einsum('bsc,bsd->cd', h, h).mean(0) * 0.1"),
    Piece("fft", "h = <<torch.fft.fft(h, dim=1).real|torch.fft.ifft(torch.fft.fft(h) * 2).real|"
          "torch.fft.irfft(torch.fft.rfft(h, dim=1) * 0.5, n=SS, dim=1)|torch.fft.fft2(h).abs()>>"),
    Piece("fourier filter", "h = torch.fft.irfft(torch.fft.rfft(h, dim=1, norm='ortho') * torch.view_as_complex(self.PPw), "
          "n=SS, dim=1, norm='ortho')", "self.PPw = nn.Parameter(torch.randn(SS // 2 + 1, CC, 2))"),
    Piece("complex numbers", "PPz = torch.complex(h, h.tanh())\nh = <<(PPz * PPz.conj()).real|PPz.abs()|(PPz * PPz).imag|"
          "torch.polar(h.abs() + 1, h).real>>"),
    Piece("inverse", SQUARE + "h = h @ <<torch.linalg.inv(PPa)|torch.linalg.pinv(PPa)|torch.inverse(PPa)>>"),
    Piece("solve", SQUARE + "h = <<torch.linalg.solve(PPa, h.transpose(1, 2)).transpose(1, 2)|"
          "torch.linalg.lstsq(PPa, h.transpose(1, 2)).solution.transpose(1, 2)>>"),
    Piece("cholesky", SQUARE + "PPc = torch.linalg.cholesky(PPa)\nh = <<h @ PPc|torch.cholesky_solve(h.transpose(1, 2), "
          "PPc).transpose(1, 2)|torch.linalg.solve_triangular(PPc, h.transpose(1, 2), upper=False).transpose(1, 2)>>"),
    Piece("determinant", SQUARE + "PPa = PPa + PPa.triu()\nh = h + <<torch.linalg.slogdet(PPa)[1]|torch.logdet(PPa)|torch.linalg.det(PPa).log()>>[:, None, None]"),
    Piece("matrix exponential", SQUARE + "h = h @ torch.matrix_exp((PPa * 0.1)<<|.transpose(1, 2)>>)"),
    Piece("eigenvalues", SQUARE + "h = h + torch.linalg.eigvalsh(PPa).sum(-1)[:, None, None]"),
    Piece("tensordot", "h = torch.tensordot(h, self.PPw, ([2], [0]))", "self.PPw = nn.Parameter(torch.randn(CC, CC))"),
    Piece("baddbmm", "h = torch.baddbmm(h, h @ h.transpose(1, 2), h, beta=0.5, alpha=0.1)"),
    Piece("kron", "h = h @ torch.kron(self.PPw, torch.eye(CC, dtype=h.dtype))", "self.PPw = nn.Parameter(torch.randn(1, 1))"),
    Piece("addcmul", "h = torch.<<addcmul(h, h, h, value=0.1)|lerp(h, h.tanh(), 0.3)|addcdiv(h, h, 1 + h * h, value=2)>>"),
    Piece("pointwise", "h = <<h.clamp(-1, 1)|torch.hypot(h, h + 1)|torch.erf(h)|h.sigmoid().log()|torch.logit(h.sigmoid())|"
          "torch.atan2(h, 1 + h * h)|h.remainder(1.5)|torch.fmod(h, 1.5)|torch.lgamma(h.abs() + 1)|F.softplus(h)|"
          "torch.special.i0(h)|torch.nan_to_num(h / 1)|h.sign() * h|F.huber_loss(h, h * 0, reduction='none')|torch.sinc(h)>>"),
    Piece("losses", "h = h + <<F.kl_div(F.log_softmax(h, -1), h.softmax(-1).detach(), reduction='sum')|"
          "F.smooth_l1_loss(h, h.flip(1))|F.cosine_similarity(h, h.flip(1), dim=-1).unsqueeze(-1)|"
          "F.binary_cross_entropy_with_logits(h, (h > 0).to(h.dtype))|F.mse_loss(h, h.roll(1, 1))>>", when=longer),
    Piece("cross entropy of channels", "h = h + F.cross_entropy(h.transpose(1, 2), h.detach().argmin(-1)<<|, "
          "label_smoothing=0.1|, ignore_index=0, reduction='sum'>>)", when=wider),
    Piece("integers", "PPi = (h.detach() * 4).to(torch.<<int32|int64|int16>>)\nh = h + (PPi % 3 + PPi // 2).to(h.dtype)"),
    Piece("down and up", "h = h.<<float().double()|to(torch.float32).to(torch.float64)>> + h"),
    Piece("constants", "h = h * torch.linspace(0.5, 1.5, CC, dtype=h.dtype) + torch.tensor(<<[[1.0]]|0.25>>, dtype=h.dtype)"),
    Piece("positions", "h = h + torch.arange(SS, dtype=h.dtype)[:, None] / SS"),
    Piece("assertion", "assert h.shape[-1] == CC\ntorch._assert(h.ndim == 3, 'three dims')\nh = h * 2"),
    Piece("distribution", "h = h + torch.distributions.Normal(h, 1.0).log_prob(torch.zeros_like(h))"),
    Piece("distribution with a scale", "h = h + torch.distributions.Normal(h, F.softplus(h) + 0.1).log_prob(h.detach() * 0.5)"),
    Piece("hooks on what is saved", "with torch.autograd.graph.saved_tensors_hooks(<<lambda t: t, lambda t: t|lambda t: t.float(), lambda t: t.double()>>):\n"
          "    h = torch.tanh(h)"),
    Piece("distribution drawn", "h = torch.distributions.Normal(h, 0.1).rsample()"),
)  # fmt: skip

REGIONS = (
    Piece("no_grad region", "with torch.no_grad():\n    PPy = self.PPl(h)\nh = h + PPy", "self.PPl = nn.Linear(CC, CC)"),
    Piece("detached", "h = h + <<h.detach() * 2|torch.tanh(h.detach())|h.data * 0.5>>"),
    Piece("enable_grad inside no_grad", "with torch.no_grad():\n    with torch.enable_grad():\n        PPy = self.PPl(h)\nh = h + PPy",
          "self.PPl = nn.Linear(CC, CC)"),
    Piece("decorated with no_grad", "h = h + self.PPm(h)", "self.PPm = PPTeacher()",
          "class PPTeacher(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
          "        self.l = nn.Linear(CC, CC)\n\n    @torch.no_grad()\n    def forward(self, h):\n        return self.l(h)"),
    Piece("checkpoint", "h = checkpoint(self.PPl, h, use_reentrant=<<False|True>>)",
          "self.PPl = nn.Sequential(nn.Linear(CC, CC), nn.Tanh())", trained=True),
    Piece("checkpoint of a function", "def PPf(x):\n    return torch.tanh(self.PPl(x)) * x\nh = checkpoint(PPf, h, use_reentrant=False)",
          "self.PPl = nn.Linear(CC, CC)"),
    Piece("checkpoint with dropout", "h = checkpoint(self.PPl, h, use_reentrant=False)",
          "self.PPl = nn.Sequential(nn.Linear(CC, CC), nn.Dropout(0.5))"),
    Piece("autocast", "with torch.autocast('cpu', dtype=torch.bfloat16):\n    PPy = self.PPl(h)\nh = h + PPy.to(h.dtype)",
          "self.PPl = nn.Linear(CC, CC)"),
    Piece("autocast off", "with torch.autocast('cpu', enabled=False):\n    h = self.PPl(h)", "self.PPl = nn.Linear(CC, CC)"),
    Piece("cond", "h = torch.cond(h.square().sum() > 1.0, lambda x: x.sin(), lambda x: x * 2, (h,))"),
    Piece("gradient penalty", "PPz = h if h.requires_grad else h.detach().requires_grad_()\n"
          "PPg, = torch.autograd.grad(self.PPl(PPz).tanh().sum(), PPz, create_graph=True)\n"
          "h = h + PPg.square().sum()", "self.PPl = nn.Linear(CC, 1)", trained=True),
    Piece("forces", "PPx = h.detach().requires_grad_()\nwith torch.enable_grad():\n    PPe = self.PPl(PPx).square().sum()\n"
          "    PPf, = torch.autograd.grad(PPe, PPx, create_graph=True)\nh = h - 0.1 * PPf", "self.PPl = nn.Linear(CC, 1)"),
    Piece("func.grad", "h = h + torch.func.grad(lambda x: self.PPl(x).tanh().sum())(h)", "self.PPl = nn.Linear(CC, 1)"),
    Piece("func.vmap", "h = torch.func.vmap(lambda x: x * x.sum())(h)"),
    Piece("func.jvp", "h = torch.func.jvp(torch.tanh, (h,), (torch.ones_like(h),))[1] + h"),
    Piece("functional call", "h = torch.func.functional_call(self.PPl, {'weight': self.PPl.weight * 2}, (h,))",
          "self.PPl = nn.Linear(CC, CC, bias=False)"),
    Piece("inner gradient step", "PPw = self.PPl.weight\nPPe = F.linear(h.detach(), PPw).square().mean()\n"
          "PPg, = torch.autograd.grad(PPe, PPw, create_graph=True)\nh = F.linear(h, PPw - 0.1 * PPg)",
          "self.PPl = nn.Linear(CC, CC)", trained=True),
    Piece("jitted function", "h = PPf(h)", top="@torch.jit.script\ndef PPf(x: torch.Tensor) -> torch.Tensor:\n    return torch.tanh(x) * 2"),
    Piece("item of a constant", "h = h * float(torch.tensor(<<0.5|2.0>>))"),
    Piece("try and except", "try:\n    h = h.view(-1, 999)\nexcept RuntimeError:\n    h = h * 2"),
    Piece("global module mode", "h = h * (2.0 if self.training else 0.5)"),
    Piece("gradient mode", "h = h * (2.0 if torch.is_grad_enabled() else 0.5)"),
    Piece("requires_grad", "h = h * 2 if h.requires_grad else h * 0.5"),
    Piece("default dtype", "h = h + torch.ones(CC)", when=lambda at: True),
    Piece("dense list", "h = torch.stack([h, h.tanh(), h.sin()]).mean(0)"),
    Piece("meshgrid", "PPa, PPb = torch.meshgrid(torch.arange(SS), torch.arange(CC), indexing='ij')\nh = h + (PPa * PPb).to(h.dtype) * 0.1"),
    Piece("block diagonal", "h = h @ torch.block_diag(self.PPw, self.PPw)[: CC, : CC]", "self.PPw = nn.Parameter(torch.randn(CC, CC))"),
    Piece("outer product", "h = torch.outer(self.PPv, self.PPw) + h", "self.PPv = nn.Parameter(torch.randn(SS))\nself.PPw = nn.Parameter(torch.randn(CC))"),
    Piece("halved length", "h = (h[:, : SS // 2] + h[:, SS - SS // 2 :]) / 2", when=longer, after=lambda at: At(at.length // 2, at.channels)),
)  # fmt: skip

PIECES = ALGEBRA + REGIONS
