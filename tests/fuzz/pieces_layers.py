"""Pieces that are layers: norms, convolutions, attention, embeddings, dropout, recurrence; shared and frozen ones."""

from tests.fuzz.piece import At, Piece, both_longer, even_channels, even_length, longer, wider

INNER = "h.transpose(1, 2)"
"""The activation with channels second: ``[rows, CC, SS]``."""


def divisor(n: int) -> int:
    """The smallest divisor of a number above 1, or 1."""
    return next((d for d in range(2, n + 1) if n % d == 0), 1)


NORMS = (
    Piece("linear", "h = self.PPl(h)", "self.PPl = nn.Linear(CC, CC<<|, bias=False>>)"),
    Piece("wider", "h = self.PPl(h)", "self.PPl = nn.Linear(CC, CC + 1)", after=lambda at: At(at.length, at.channels + 1)),
    Piece("mlp", "h = h + self.PPm(h)", "self.PPm = nn.Sequential(nn.Linear(CC, 2 * CC), <<nn.GELU()|nn.ReLU(inplace=True)|"
          "nn.SiLU()|nn.Hardswish()|nn.PReLU()>>, nn.Linear(2 * CC, CC))"),
    Piece("layer norm", "h = self.PPn(h)", "self.PPn = nn.LayerNorm(<<CC|(SS, CC)|CC, elementwise_affine=False|"
          "CC, bias=False>>)"),
    Piece("layer norm of a permuted view", f"h = self.PPn({INNER}).transpose(1, 2)",
          "self.PPn = nn.LayerNorm(<<SS|(CC, SS)>>)"),
    Piece("rms norm", "h = self.PPn(h)", "self.PPn = nn.RMSNorm(CC)"),
    Piece("group norm", f"h = self.PPn({INNER}).transpose(1, 2)",
          "self.PPn = nn.GroupNorm(<<1|CC>>, CC)"),
    Piece("group norm of two groups", f"h = self.PPn({INNER}<<|.contiguous()>>).transpose(1, 2)",
          "self.PPn = nn.GroupNorm(2, CC)", when=even_channels),
    Piece("group norm of an image", "PPi = h.reshape(-1, 2, SS // 2, CC).permute(0, 3, 1, 2)\n"
          "h = self.PPn(PPi).permute(0, 2, 3, 1).reshape(-1, SS, CC)", "self.PPn = nn.GroupNorm(<<1|CC>>, CC)",
          when=even_length),
    Piece("batch norm", f"h = self.PPn({INNER}).transpose(1, 2)",
          "self.PPn = nn.BatchNorm1d(CC<<|, affine=False|, momentum=None|, track_running_stats=False>>)"),
    Piece("batch norm of an image", "PPi = h.reshape(-1, 2, SS // 2, CC).permute(0, 3, 1, 2)\n"
          "h = self.PPn(PPi).permute(0, 2, 3, 1).reshape(-1, SS, CC)", "self.PPn = nn.BatchNorm2d(CC)", when=even_length),
    Piece("frozen batch norm", f"self.PPn.eval()\nh = self.PPn({INNER}).transpose(1, 2)", "self.PPn = nn.BatchNorm1d(CC)"),
    Piece("instance norm", f"h = self.PPn({INNER}).transpose(1, 2)",
          "self.PPn = nn.InstanceNorm1d(CC<<|, affine=True|, affine=True, track_running_stats=True>>)", when=longer),
    Piece("local response norm", f"h = F.local_response_norm({INNER}, 2).transpose(1, 2)", when=wider),
    Piece("normalize", "h = F.normalize(h, dim=<<-1|1>>)"),
)  # fmt: skip

CONVOLUTIONS = (
    Piece("convolution", f"h = self.PPc({INNER}).transpose(1, 2)",
          "self.PPc = nn.Conv1d(CC, CC, 3, padding=1<<|, bias=False|, groups=CC|, padding_mode='circular'>>)",
          when=longer),
    Piece("causal convolution", "PPx = h.transpose(1, 2)\n"
          "h = <<self.PPc(F.pad(PPx, (2, 0)))[..., :SS]|self.PPc(F.pad(PPx, (1, 0)))|self.PPc(F.pad(PPx, (1, 1)))[..., 1:]>>"
          ".transpose(1, 2)", "self.PPc = nn.Conv1d(CC, CC, 2<<|, groups=CC>>)", when=longer),
    Piece("strided convolution", f"h = self.PPc({INNER}).transpose(1, 2)", "self.PPc = nn.Conv1d(CC, CC, 2, stride=2)",
          when=even_length, after=lambda at: At(at.length // 2, at.channels)),
    Piece("transposed convolution", f"h = self.PPc({INNER}).transpose(1, 2)",
          "self.PPc = nn.ConvTranspose1d(CC, CC, 2, stride=2)", after=lambda at: At(at.length * 2, at.channels),
          when=lambda at: at.length < 5),
    Piece("convolution of an image", "PPi = self.PPc(h<<|.contiguous()>>.reshape(-1, 2, SS // 2, CC).permute(0, 3, 1, 2)"
          "<<|.contiguous(memory_format=torch.channels_last)|.contiguous()>>)\n"
          "h = PPi.<<permute(0, 2, 3, 1).reshape(-1, SS, CC)|flatten(2).transpose(1, 2)>>",
          "self.PPc = nn.Conv2d(CC, CC, 3, padding=1)", when=even_length),
    Piece("norm and convolution of an image",
          "PPi = self.PPl(h).reshape(-1, 2, SS // 2, CC).permute(0, 3, 1, 2)\n"
          "h = self.PPc(F.silu(self.PPn(PPi))).flatten(2).transpose(1, 2)",
          "self.PPl = nn.Linear(CC, CC)\nself.PPn = nn.GroupNorm(<<1|CC>>, CC)\nself.PPc = nn.Conv2d(CC, CC, 1)",
          when=even_length),
    Piece("average pooling", f"h = F.avg_pool1d({INNER}, 2).transpose(1, 2)", when=even_length,
          after=lambda at: At(at.length // 2, at.channels)),
    Piece("max pooling", f"h = F.max_pool1d({INNER}, <<3, 1, 1|3, stride=1, padding=1>>).transpose(1, 2)", when=longer),
    Piece("adaptive pooling", f"h = F.adaptive_avg_pool1d({INNER}, 2).transpose(1, 2)",
          after=lambda at: At(2, at.channels), when=longer),
    Piece("interpolate", f"h = F.interpolate({INNER}, scale_factor=2, mode='<<nearest|linear>>').transpose(1, 2)",
          after=lambda at: At(at.length * 2, at.channels), when=lambda at: at.length < 5),
    Piece("unfolded patches", "PPi = F.unfold(h.unsqueeze(1), (1, CC))\nh = PPi.transpose(1, 2)"),
    Piece("padding", f"h = F.pad({INNER}, (1, 1)<<|, mode='reflect'|, mode='replicate'>>)[..., 1:-1].transpose(1, 2)",
          when=longer),
)  # fmt: skip

ATTENTION = (
    Piece("attention", "PPq, PPk, PPv = self.PPl(h).chunk(3, -1)\n"
          "h = F.scaled_dot_product_attention(PPq<<, | * 2, >>PPk, PPv<<|, is_causal=True>>)",
          "self.PPl = nn.Linear(CC, 3 * CC)"),
    Piece("attention of heads", "PPq, PPk, PPv = (t.reshape(-1, SS, 2, CC // 2).transpose(1, 2) for t in "
          "self.PPl(h).<<chunk(3, -1)|split(CC, -1)>>)\n"
          "PPo = F.scaled_dot_product_attention(PPq, PPk, PPv<<|, is_causal=True|, attn_mask=self.PPmask>>)\n"
          "h = PPo.transpose(1, 2).reshape(-1, SS, CC)",
          "self.PPl = nn.Linear(CC, 3 * CC)\nself.register_buffer('PPmask', torch.ones(SS, SS, dtype=torch.bool).tril())",
          when=even_channels),
    Piece("attention under a mask's function", "PPd = (h.detach().sum(-1) * 3).long().abs() % 3\nPPa = torch.arange(SS)\n"
          "PPm = <<(PPa[:, None] >= PPa) & (PPa[:, None] - PPa < 2)|(PPa[:, None] - PPa).abs() < 2|"
          "PPd[:, None, :, None] == PPd[:, None, None]|(PPd[:, None, None] < 2) & torch.ones(SS, SS).bool().tril()|"
          "(PPa - PPa[:, None]).to(h) * self.PPs>>\n"
          "h = F.scaled_dot_product_attention(h[:, None], h[:, None], h[:, None], PPm).squeeze(1)",
          "self.register_buffer('PPs', torch.tensor(0.5))"),
    Piece("attention of a permuted convolution",
          "PPq, PPk, PPv = self.PPc(h.transpose(1, 2)).reshape(-1, 3, 1, CC, SS).transpose(-1, -2)"
          "<<|.contiguous()>>.unbind(1)\n"
          "h = F.scaled_dot_product_attention(PPq, PPk, PPv).squeeze(1)", "self.PPc = nn.Conv1d(CC, 3 * CC, 1)"),
    Piece("multi-head attention", "h = self.PPa(h, h, h, need_weights=<<True|False>>)[0]",
          "self.PPa = nn.MultiheadAttention(CC, <<1|2>>, batch_first=True)", when=even_channels),
    Piece("attention by hand", "PPs = (h @ h.transpose(1, 2)) / CC ** 0.5\n"
          "PPs = PPs.masked_fill(torch.ones(SS, SS, dtype=torch.bool).triu(1), float('-inf'))\nh = PPs.softmax(-1) @ h"),
    Piece("encoder layer", "h = self.PPe(h)",
          "self.PPe = nn.TransformerEncoderLayer(CC, 1, 4, dropout=0.0, batch_first=True<<|, norm_first=True>>)"),
)  # fmt: skip

OTHERS = (
    Piece("embedding", "PPi = (h.detach().sum(-1) * 3).long().abs() % 5\nh = h + self.PPe(PPi)",
          "self.PPe = nn.Embedding(5, CC<<|, padding_idx=0|, padding_idx=4|, scale_grad_by_freq=True>>)"),
    Piece("embedding with max norm", "PPi = (h.detach().sum(-1) * 3).long().abs() % 5\nh = h + self.PPe(PPi)",
          "self.PPe = nn.Embedding(5, CC, max_norm=1.0)"),
    Piece("sparse embedding", "PPi = (h.detach().sum(-1) * 3).long().abs() % 5\nh = h + self.PPe(PPi)",
          "self.PPe = nn.Embedding(5, CC, sparse=True)"),
    Piece("embedding bag", "PPi = (h.detach() * 3).long().abs().flatten(1) % 5\nh = h + self.PPe(PPi).unsqueeze(1)",
          "self.PPe = nn.EmbeddingBag(5, CC, mode='<<sum|mean|max>>')"),
    Piece("position embedding", "h = h + self.PPe(torch.arange(SS))", "self.PPe = nn.Embedding(SS, CC)"),
    Piece("dropout", "h = <<F.dropout(h, 0.5, self.training)|self.PPd(h)|F.dropout(h, 0.3)>>", "self.PPd = nn.Dropout(0.5)"),
    Piece("channel dropout", "h = self.PPd(h)", "self.PPd = <<nn.Dropout1d(0.5)|nn.AlphaDropout(0.5)>>"),
    Piece("noise", "if self.training:\n    h = h + <<torch.randn_like(h)|torch.rand(h.shape, dtype=h.dtype)|"
          "torch.empty_like(h).normal_(0, 0.1)|torch.bernoulli(torch.full_like(h, 0.5))>>"),
    Piece("noise of a permuted view", "if self.training:\n    PPt = h.transpose(1, 2)\n    h = h + (<<"
          "torch.empty_like(PPt).bernoulli_(0.5)|F.alpha_dropout(PPt, 0.5, True)|torch.zeros_like(PPt).normal_()|"
          "torch.rand_like(torch.poisson(PPt.detach().abs()))|torch.bernoulli(PPt.detach().sigmoid())>>).transpose(1, 2)"),
    Piece("lstm", "h, PPs = self.PPr(h)", "self.PPr = nn.<<LSTM|GRU|RNN>>(CC, CC, batch_first=True)",
          when=lambda at: at.length < 4),
    Piece("gru cell", "PPs = h.new_zeros(h.shape[0], CC)\nfor PPt in h.unbind(1):\n    PPs = self.PPr(PPt, PPs)\n"
          "h = h + PPs.unsqueeze(1)", "self.PPr = nn.GRUCell(CC, CC)", when=lambda at: at.length < 4),
    Piece("bilinear", "h = self.PPb(h, torch.tanh(h))", "self.PPb = nn.Bilinear(CC, CC, CC)"),
    Piece("gated", "h = F.glu(self.PPl(h), -1)", "self.PPl = nn.Linear(CC, 2 * CC)"),
    Piece("softmax", "h = <<torch.softmax(h, -1)|F.log_softmax(h, 1)|torch.softmax(h, 0)|F.softmin(h, -1)|F.gumbel_softmax"
          "(h.detach(), tau=1e6) + h>>"),
    Piece("mixture of experts",
          "PPg = self.PPr(h).softmax(-1)\nPPw, PPi = PPg.topk(1, -1)\n"
          "PPo = torch.stack([e(h) for e in self.PPe], -1)\n"
          "h = PPo.gather(-1, PPi.unsqueeze(-2).expand(-1, -1, CC, 1)).squeeze(-1) * PPw",
          "self.PPr = nn.Linear(CC, 3)\nself.PPe = nn.ModuleList(nn.Linear(CC, CC) for _ in range(3))"),
    Piece("vector quantizer",
          "PPd = torch.cdist(h.reshape(-1, CC), self.PPe.weight)\nPPi = PPd.argmin(-1)\n"
          "PPz = self.PPe(PPi).reshape(h.shape)\nh = h + (PPz - h).detach() + 0.1 * PPz",
          "self.PPe = nn.Embedding(4, CC)"),
    Piece("low-rank adapter", "h = self.PPl(h) + self.PPb(self.PPa(h)) * 0.5",
          "self.PPl = nn.Linear(CC, CC).requires_grad_(False)\nself.PPa = nn.Linear(CC, 2, bias=False)\n"
          "self.PPb = nn.Linear(2, CC, bias=False)"),
)  # fmt: skip

SHARED = (
    Piece("module called twice", "h = self.PPl(torch.tanh(self.PPl(h)))", "self.PPl = nn.Linear(CC, CC)"),
    Piece("tied weights", "h = self.PPb(torch.tanh(self.PPa(h)))",
          "self.PPa, self.PPb = nn.Linear(CC, CC), nn.Linear(CC, CC)\nself.PPb.weight = self.PPa.weight"),
    Piece("tied and transposed", "h = F.linear(torch.tanh(self.PPa(h)), self.PPa.weight.t())",
          "self.PPa = nn.Linear(CC, CC)"),
    Piece("module under two names", "h = self.PPa(h) + self.PPb(h * 2)", "self.PPa = nn.Linear(CC, CC)\nself.PPb = self.PPa"),
    Piece("parameter under two names", "h = h * self.PPa + self.PPb",
          "self.PPa = nn.Parameter(torch.randn(CC))\nself.PPb = self.PPa"),
    Piece("frozen", "h = torch.tanh(self.PPl(h))", "self.PPl = nn.Linear(CC, CC)\n<<self.PPl.requires_grad_(False)|"
          "self.PPl.weight.requires_grad_(False)|self.PPl.bias.requires_grad = False>>"),
    Piece("unused parameter", "h = h * 2", "self.PPunused = nn.Parameter(torch.randn(3))"),
    Piece("scalar parameter", "h = h * self.PPs<<|.exp()|.tanh()>>", "self.PPs = nn.Parameter(torch.tensor(0.7))"),
    Piece("parameter list", "for PPw in self.PPws:\n    h = h * PPw",
          "self.PPws = nn.ParameterList([nn.Parameter(torch.rand(CC)) for _ in range(2)])"),
    Piece("parameter dict", "h = h * self.PPws['a'] + self.PPws['b']",
          "self.PPws = nn.ParameterDict({'a': nn.Parameter(torch.rand(CC)), 'b': nn.Parameter(torch.rand(1))})"),
    Piece("module dict", "h = self.PPm['<<a.b|c|a b|x>>'.replace('.', '_')](h)",
          "self.PPm = nn.ModuleDict({k: nn.Linear(CC, CC) for k in ('a_b', 'c', 'a b', 'x')})"),
    Piece("complex parameter", "h = (h * self.PPz).real + h", "self.PPz = nn.Parameter(torch.randn(CC, dtype=torch.complex128))"),
    Piece("names with quotes", "h = self.PPm[\"a'b\"](h)",
          "self.PPm = nn.ModuleDict({\"a'b\": nn.Linear(CC, CC)})"),
    Piece("float32 parameter", "h = h + (self.PPw * 2).to(h.dtype)",
          "self.PPw = nn.Parameter(torch.randn(CC))  # made double with the model"),
    Piece("parameter of zero elements", "h = h + self.PPw.sum()", "self.PPw = nn.Parameter(torch.randn(0, CC))"),
    Piece("module behind a lambda", "h = (lambda f, x: f(x))(self.PPl, h)", "self.PPl = nn.Linear(CC, CC)"),
    Piece("list of modules in Python", "for PPf in self.PPlist:\n    h = PPf(h)",
          "self.PPl = nn.Linear(CC, CC)\nself.PPlist = [self.PPl, torch.tanh]"),
    Piece("strided parameter", "h = F.linear(h, self.PPw)", "self.PPw = nn.Parameter(torch.randn(CC, CC).t())"),
    Piece("expanded buffer", "h = h * self.PPc", "self.register_buffer('PPc', torch.rand(1, 1).expand(SS, CC))"),
    Piece("permuted image of odd sizes", "h = h.permute(2, 0, 1).contiguous().permute(1, 2, 0)", when=both_longer),
)  # fmt: skip

PIECES = NORMS + CONVOLUTIONS + ATTENTION + OTHERS + SHARED
