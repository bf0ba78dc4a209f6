"""Pieces that are views, in-place operators, selections and scans."""

from tests.fuzz.piece import At, Piece, both_longer, even_channels, even_length, longer, wider

VIEWS = (
    Piece("transposed matmul", "h = h + (h.transpose(1, 2) @ h).mean(1, keepdim=True)"),
    Piece("permuted", "h = torch.tanh(h.permute(<<2, 0, 1|1, 2, 0|2, 1, 0>>))<<.contiguous()|>>.sum()<< * 1e-2|.tanh()>> + h"),
    Piece("there and back", "h = h.permute(1, 0, 2)<<|.contiguous()|.clone()>>.transpose(0, 1)"),
    Piece("folded rows", "h = torch.tanh(h.reshape(-1, CC)).view(-1, SS, CC)"),
    Piece("flattened", "h = (h.flatten(1) * self.PPw).unflatten(1, (SS, CC))", "self.PPw = nn.Parameter(torch.rand(SS * CC))"),
    Piece("expanded", "h = h + h.mean(1, keepdim=True).expand(-1, SS, -1)"),
    Piece("expanded and written", "PPe = h[:, :1].expand(-1, SS, -1).<<clone()|contiguous()>>\nPPe.mul_(2)\nh = h + PPe"),
    Piece("unfolded", "h = h.unfold(1, 2, 1).mean(-1)", when=longer, after=lambda at: At(at.length - 1, at.channels)),
    Piece("as_strided", "h = h.contiguous().as_strided((h.shape[0], SS, CC), (SS * CC, <<CC, 1|1, SS|0, 1>>))"),
    Piece("chunks", "PPa, PPb = h.chunk(2, <<-1|2>>)\nh = torch.cat([PPb, PPa * 2], -1)", when=even_channels),
    Piece("unbound", "h = torch.stack([t * (i + 1) for i, t in enumerate(h.unbind(1))], <<1|1>>)"),
    Piece("split unevenly", "PPa, PPb = h.split([1, CC - 1], -1)\nh = torch.cat((PPa.tanh(), PPb), -1)", when=wider),
    Piece("every second", "h = torch.cat([h[..., ::2], h[..., 1::2]], -1)", when=wider),
    Piece("interleaved", "h = torch.stack([h[..., ::2], -h[..., 1::2]], -1).flatten(-2)", when=even_channels),
    Piece("flipped", "h = h.flip(<<1|-1|0|(0, 1)>>) + h"),
    Piece("rolled", "h = h.roll(<<1, 1|-1, -1|1, 0|(1, 1), (1, 2)>>) * 2"),
    Piece("narrowed", "h = F.pad(h.narrow(1, 1, SS - 1), (0, 0, 1, 0))", when=longer),
    Piece("shifted", "h = h + <<F.pad(h, (0, 0, 1, 0))[:, :-1]|F.pad(h[:, 1:], (0, 0, 0, 1), value=0.5)|F.pad(h, (0, 0, -1, 1))|"
          "torch.cat([h.new_zeros(h.shape[0], 1, CC), h[:, :-1]], 1)|torch.cat([h[:, 1:], h[:, -1:]], 1)>>", when=longer),
    Piece("selected", "h = h * h.select(1, <<0|-1>>).unsqueeze(1)"),
    Piece("diagonal", "h = h + torch.diagonal(h, dim1=1, dim2=2).sum(-1)[:, None, None]"),
    Piece("triangle", "h = <<h.tril()|h.triu()|torch.tril(h, -1) + h>>"),
    Piece("real view of complex", "PPz = torch.view_as_complex(h.reshape(-1, SS, CC // 2, 2)<<|.contiguous()>>)\n"
          "h = torch.view_as_real(PPz * self.PPf).flatten(-2)",
          "self.register_buffer('PPf', torch.polar(torch.ones(CC // 2, dtype=torch.float64), "
          "torch.arange(CC // 2, dtype=torch.float64)))", when=even_channels),
    Piece("rotary", "PPa, PPb = h.chunk(2, -1)\nPPt = torch.arange(SS, dtype=h.dtype)[:, None]\n"
          "h = torch.cat([PPa * PPt.cos() - PPb * PPt.sin(), PPb * PPt.cos() + PPa * PPt.sin()], -1)", when=even_channels),
    Piece("windows", "h = h.view(-1, SS // 2, 2, CC).transpose(2, 3).flatten(2)",
          when=even_length, after=lambda at: At(at.length // 2, at.channels * 2)),
    Piece("movedim", "h = h.movedim(-1, 0).mul(self.PPw[:, None, None]).movedim(0, -1)", "self.PPw = nn.Parameter(torch.rand(CC))"),
    Piece("repeated", "h = h.<<repeat(1, 2, 1)|repeat_interleave(2, 1)|tile(1, 2, 1)>>", when=lambda at: at.length < 4,
          after=lambda at: At(at.length * 2, at.channels)),
    Piece("contiguous in another format", "h = h.unsqueeze(-1).contiguous(memory_format=torch.channels_last).squeeze(-1)"),
    Piece("squeezed", "h = h.unsqueeze(<<0|1|-1>>).squeeze()<<|.clone()>>.reshape(-1, SS, CC)"),
)  # fmt: skip

WRITES = (
    Piece("in-place", "h = <<h.clone()|h * 1>>\nh.<<mul_(2)|add_(1)|relu_()|tanh_()|clamp_(-1, 1)|exp_()>>"),
    Piece("slice written", "h = h.clone()\nh[<<:, 0|..., 0|:, -1:|0|:1>>] = <<0|1.5>>"),
    Piece("slice written with values", "PPy = h.clone()\nPPy[:, 0] = torch.tanh(h[:, -1])\nh = PPy"),
    Piece("mask written", "h = h.clone()\nh[h.detach() > 0.5] = <<0.5|-1>>"),
    Piece("view written", "PPy = h * 1\nPPy.<<transpose(1, 2)|view(-1)|select(1, 0)|unsqueeze(0)|diagonal(0, 1, 2)>>"
          ".mul_(<<2|0.5>>)\nh = PPy"),
    Piece("written after use", "PPy = h * 1\nPPs = PPy.sum()\nPPy.add_(1)\nh = PPy * PPs.tanh()"),
    Piece("index_put", "h = h.index_put((torch.tensor([0]),), torch.tensor(2.0, dtype=h.dtype))"),
    Piece("index_add", "h = h.clone().index_add_(1, torch.tensor([0, 0]), h[:, :1].expand(-1, 2, -1))"),
    Piece("copied", "PPy = torch.empty_like(h)\nPPy.copy_(h)\nh = PPy * 2"),
    Piece("zeros filled", "PPy = h.new_zeros(h.shape)\nfor PPi in range(SS):\n    PPy[:, PPi] = h[:, SS - 1 - PPi]\nh = PPy"),
    Piece("masked_fill", "h = h.masked_fill(h > 0.3, <<0.0|-1.0>>)"),
    Piece("masked_scatter", "h = h.masked_scatter(h > 0, torch.tanh(h))"),
    Piece("out argument", "PPy = torch.empty_like(h)\ntorch.tanh(h.detach(), out=PPy)\nh = h + PPy"),
    Piece("set item of a view", "PPy = h.clone()\nPPv = PPy[:, :1]\nPPv += 1\nPPv *= 2\nh = PPy"),
)  # fmt: skip

SELECTIONS = (
    Piece("where", "h = torch.where(h > 0, h, <<0.1 * h|self.PPw|torch.zeros_like(h)>>)", "self.PPw = nn.Parameter(torch.rand(CC))"),
    Piece("gather", "PPi = h.detach().argsort(-1)\nh = h.gather(-1, PPi)"),
    Piece("scatter", "PPi = h.detach().argsort(1)\nh = torch.zeros_like(h).<<scatter(1, PPi, h)|scatter_add(1, PPi, h)|"
          "scatter_reduce(1, PPi, h, 'sum')>>"),
    Piece("index_select", "h = h.index_select(<<1, torch.arange(SS - 1, -1, -1)|2, torch.arange(CC).flip(0)>>)"),
    Piece("advanced indexing", "h = h[:, <<torch.arange(SS).flip(0)|[0] * SS>>] + h"),
    Piece("indexed by a mask", "h = h + h[self.PPm.expand(h.shape[0], SS)].sum(0)",
          "self.register_buffer('PPm', torch.arange(SS) == 0)"),
    Piece("cumsum", "h = torch.<<cumsum(h, 1)|cumsum(h, 0)|cumprod(h.tanh(), 1)|cummax(h, 1).values|logcumsumexp(h, -1)>>"),
    Piece("sort", "h = h.sort(<<-1|1|0>>, descending=<<True|False>>).values"),
    Piece("topk", "h = h + h.topk(1, <<-1|1|0>>).values"),
    Piece("maximum", "h = h + h.<<max(1, keepdim=True).values|amax(-1, keepdim=True)|max(0).values|min(-1, keepdim=True)[0]|"
          "median(1, keepdim=True).values|kthvalue(1, -1, keepdim=True).values>>"),
    Piece("argmax", "h = h + F.one_hot(h.argmax(-1), CC).to(h.dtype)"),
    Piece("statistics", "h = (h - h.mean(<<1|-1|0|(0, 1)>>, keepdim=True)) / (1 + h.<<var|std>>(<<1|-1|0>>, "
          "keepdim=True, unbiased=False))"),
    Piece("norms", "h = h / (1 + <<h.norm(dim=-1, keepdim=True)|torch.linalg.vector_norm(h, 1, 1, keepdim=True)|"
          "h.norm()|h.abs().amax()>>)"),
    Piece("logsumexp", "h = h - h.logsumexp(<<1|-1|0>>, keepdim=True)"),
    Piece("product", "h = h * h.tanh().prod(<<1|-1>>, keepdim=True)"),
    Piece("bucketize", "h = h + torch.bucketize(h.detach(), torch.tensor([-1.0, 0.0, 1.0], dtype=h.dtype)).to(h.dtype)"),
    Piece("cdist", "h = h + torch.cdist(h, h + 1).mean(-1, keepdim=True)"),
    Piece("batch statistics", "h = h - <<0.5 * h.mean(0)|h.sum((0, 2), keepdim=True).tanh()|h.amax(0, keepdim=True)>>"),
    Piece("shape arithmetic", "h = h * (1.0 / h.shape[0]) + h.numel() * 0.01"),
    Piece("rows by a loop", "h = torch.cat([torch.tanh(h[i : i + 1]) for i in range(h.shape[0])])"),
    Piece("rows joined", "h = torch.cat([h, -h])[: h.shape[0]]"),
    Piece("rows chunked", "h = torch.cat([t.tanh() for t in h.chunk(2)])"),
    Piece("contrastive", "PPz = F.normalize(h.mean(1), dim=-1)\n"
          "h = h + F.cross_entropy(PPz @ PPz.t(), torch.arange(h.shape[0]))", when=both_longer),
)  # fmt: skip

PIECES = VIEWS + WRITES + SELECTIONS
