"""Pieces with state: buffers, parameters written, Python attributes read and written."""

from tests.fuzz.piece import Piece

VECTOR = "self.register_buffer('PPc', torch.rand(CC)<<|, persistent=False>>)"
MEAN = "h.detach().mean((0, 1))"
TRAINING = "<<|if self.training:\n    >>"

BUFFERS = (
    Piece("buffer read", "h = h * self.PPc", VECTOR),
    Piece("buffer reassigned", f"{TRAINING}self.PPc = 0.9 * self.PPc + 0.1 * {MEAN}\nh = h - self.PPc", VECTOR),
    Piece("buffer reassigned after use", f"h = h - self.PPc\nself.PPc = 0.9 * self.PPc + 0.1 * {MEAN}", VECTOR),
    Piece("buffer written", f"{TRAINING}self.PPc.mul_(0.9).add_({MEAN}, alpha=0.1)\nh = h - self.PPc.clone()", VECTOR),
    Piece("buffer copied into", f"h = h + self.PPc\nwith torch.no_grad():\n    self.PPc.copy_({MEAN})", VECTOR),
    Piece("buffer through data", f"h = h - self.PPc\nself.PPc.data = 0.9 * self.PPc.data + 0.1 * {MEAN}", VECTOR),
    Piece("buffer in data", f"h = h - self.PPc\nself.PPc.data.mul_(0.9).add_(0.1 * {MEAN})", VECTOR),
    Piece("buffer row written", f"self.PPq[self.PPi] = {MEAN}\nh = h + self.PPq.mean(0)",
          "self.register_buffer('PPq', torch.zeros(3, CC))\nself.PPi = <<0|1|-1>>"),
    Piece("queue", f"h = h + self.PPq.mean(0)\nwith torch.no_grad():\n    PPk = int(self.PPp)\n"
          f"    self.PPq[PPk] = {MEAN}\n    self.PPp[0] = (PPk + 1) % 4",
          "self.register_buffer('PPq', torch.zeros(4, CC))\n"
          "self.register_buffer('PPp', torch.zeros(1, dtype=torch.long))"),
    Piece("queue rolled", f"h = h + self.PPq.mean(0)\nself.PPq = torch.cat([self.PPq[1:], {MEAN}[None]])",
          "self.register_buffer('PPq', torch.zeros(4, CC))"),
    Piece("counter buffer", "self.PPn += 1\nh = h / (1 + self.PPn)",
          "self.register_buffer('PPn', torch.zeros((), dtype=<<torch.long|torch.float64>>))"),
    Piece("counter buffer after use", "h = h / (1 + self.PPn)\nself.PPn = self.PPn + 1",
          "self.register_buffer('PPn', torch.zeros((), dtype=torch.long))"),
    Piece("buffer of a child written from outside", f"self.PPm.c = 0.5 * self.PPm.c + {MEAN}\nh = self.PPm(h)",
          "self.PPm = PPHolder()",
          "class PPHolder(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
          "        self.register_buffer('c', torch.ones(CC))\n\n    def forward(self, h):\n        return h * self.c"),
    Piece("buffer that is None at first", f"if self.PPc is None:\n    self.PPc = {MEAN}\nh = h - self.PPc",
          "self.register_buffer('PPc', None)"),
    Piece("buffer shared by two modules", f"self.PPa.c.add_({MEAN})\nh = self.PPb(self.PPa(h))",
          "self.PPa, self.PPb = PPHolder(), PPHolder()\nself.PPb.c = self.PPa.c",
          "class PPHolder(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
          "        self.register_buffer('c', torch.ones(CC))\n\n    def forward(self, h):\n        return h + 0.1 * self.c"),
    Piece("buffer changed by the loop", "h = h * self.PPc", VECTOR, change="<<MM.PPc.mul_(2)|MM.PPc.fill_(0.5)|"
          "MM.PPc = torch.full_like(MM.PPc, 0.25)>>"),
    Piece("momentum encoder",
          "with torch.no_grad():\n    for PPs, PPt in zip(self.PPq.parameters(), self.PPk.parameters()):\n"
          "        <<PPt.mul_(0.9).add_(PPs, alpha=0.1)|PPt.data = 0.9 * PPt.data + 0.1 * PPs.data|"
          "PPt.copy_(0.9 * PPt + 0.1 * PPs)>>\n    PPz = self.PPk(h)\nh = self.PPq(h) + PPz",
          "self.PPq, self.PPk = nn.Linear(CC, CC), nn.Linear(CC, CC)\nself.PPk.requires_grad_(False)"),
    Piece("trained parameter clamped", "with torch.no_grad():\n    self.PPw.clamp_(-0.5, 0.5)\nh = h * self.PPw",
          "self.PPw = nn.Parameter(torch.randn(CC))"),
    Piece("trained parameter clamped in data", "self.PPw.data.clamp_(-0.5, 0.5)\nh = h * self.PPw",
          "self.PPw = nn.Parameter(torch.randn(CC))"),
    Piece("parameter changed by the loop", "h = h * self.PPw", "self.PPw = nn.Parameter(torch.rand(CC))",
          change="with torch.no_grad():\n    MM.PPw.mul_(0.5)"),
    Piece("parameter frozen by the loop", "h = h + self.PPl(h)", "self.PPl = nn.Linear(CC, CC)",
          change="MM.PPl.requires_grad_(False)"),
)  # fmt: skip

READ = (
    Piece("float attribute", "h = h * self.PPbeta", "self.PPbeta = 1.5", change="MM.PPbeta = 0.25", python=("PPbeta",)),
    Piece("integer attribute", "h = h.roll(self.PPn, 1) * self.PPn", "self.PPn = 1", change="MM.PPn = 2"),
    Piece("flag", "if self.PPflag:\n    h = self.PPl(h)", "self.PPflag = <<True|False>>\nself.PPl = nn.Linear(CC, CC)",
          change="MM.PPflag = not MM.PPflag"),
    Piece("string attribute", "h = getattr(torch, self.PPact)(h)", "self.PPact = 'tanh'", change="MM.PPact = 'sigmoid'"),
    Piece("attribute that is None", "if self.PPs is not None:\n    h = h * self.PPs", "self.PPs = None",
          change="MM.PPs = 0.5"),
    Piece("config", "h = h * self.PPcfg.scale if self.PPcfg.on else -h",
          "self.PPcfg = types.SimpleNamespace(scale=2.0, on=True)",
          change="<<MM.PPcfg.scale = 0.5|MM.PPcfg.on = False>>"),
    Piece("config dict", "h = h * self.PPcfg['scale']", "self.PPcfg = {'scale': 2.0}", change="MM.PPcfg['scale'] = 0.5"),
    Piece("list attribute", "for PPs in self.PPlist:\n    h = h * PPs", "self.PPlist = [1.5, 0.5]",
          change="<<MM.PPlist.append(2.0)|MM.PPlist[0] = 3.0>>"),
    Piece("dropout probability", "h = self.PPd(h)", "self.PPd = nn.Dropout(0.25)", change="MM.PPd.p = 0.75"),
    Piece("norm eps", "h = self.PPn(h)", "self.PPn = nn.LayerNorm(CC)", change="MM.PPn.eps = 0.5"),
    Piece("batch norm momentum", "h = self.PPn(h.transpose(1, 2)).transpose(1, 2)", "self.PPn = nn.BatchNorm1d(CC)",
          change="MM.PPn.momentum = 0.5"),
    Piece("plain tensor", "h = h * self.PPt", "self.PPt = torch.rand(CC, dtype=torch.float64)",
          change="<<MM.PPt.mul_(2)|MM.PPt = torch.ones(CC, dtype=torch.float64)|MM.PPt[0] = 3.0>>"),
    Piece("method replaced", "h = self.PPact(h)", "self.PPact = torch.tanh", change="MM.PPact = torch.sigmoid"),
    Piece("class attribute", "h = h * self.PPk.scale", "self.PPk = PPHolder()",
          "class PPHolder:\n    scale = 2.0", change="MM.PPk.scale = 0.5"),
    Piece("property", "h = h * self.PPm.scale", "self.PPm = PPHolder()",
          "class PPHolder(nn.Module):\n    base = 2.0\n\n    @property\n    def scale(self):\n"
          "        return self.base * 0.5", change="MM.PPm.base = 0.5"),
    Piece("submodule replaced", "h = self.PPact(h)", "self.PPact = nn.Tanh()", change="MM.PPact = nn.Sigmoid()"),
    Piece("child's mode", "h = self.PPd(h)", "self.PPd = nn.Dropout(0.5)", change="MM.PPd.eval()"),
)  # fmt: skip

WRITTEN = (
    Piece("counter", "self.PPn += 1\nh = h * (1 + 0.1 * self.PPn)", "self.PPn = 0", python=("PPn",)),
    Piece("counter that is not read", "self.PPn += 1\nh = h * 2", "self.PPn = 0", python=("PPn",)),
    Piece("counter that decides", "self.PPn += 1\nif self.PPn % 2:\n    h = torch.tanh(h)", "self.PPn = 0",
          python=("PPn",)),
    Piece("last value", "self.PPlast = h.detach().mean()", "self.PPlast = None", python=("PPlast",)),
    Piece("last value that is read", "if self.PPlast is not None:\n    h = h - self.PPlast\n"
          "self.PPlast = h.detach().mean()", "self.PPlast = None", python=("PPlast",)),
    Piece("last activation", "self.PPlast = h.detach()", "self.PPlast = None", python=("PPlast",)),
    Piece("auxiliary loss", "self.PPaux = h.square().mean()", "self.PPaux = 0.0", python=("PPaux",),
          aux="0.3 * MM.PPaux"),
    Piece("list of losses", "self.PPaux.append(h.square().mean())", "self.PPaux = []", python=("PPaux",)),
    Piece("list of losses in the loss", "self.PPaux = [h.square().mean(), h.abs().mean()]", "self.PPaux = []",
          python=("PPaux",), aux="0.3 * sum(MM.PPaux)"),
    Piece("dict of statistics", "self.PPstats['mean'] = h.detach().mean()\nself.PPstats['rows'] = h.shape[0]",
          "self.PPstats = {}", python=("PPstats",)),
    Piece("attribute made in forward", "self.PPshape = tuple(h.shape)\nself.PPname = 'seen'\nh = h * 2",
          python=("PPshape", "PPname")),
    Piece("running float", "self.PPs = 0.9 * self.PPs\nh = h * self.PPs", "self.PPs = 1.0", python=("PPs",)),
    Piece("plain tensor written", f"self.PPt = 0.9 * self.PPt + 0.1 * {MEAN}\nh = h - self.PPt",
          "self.PPt = torch.zeros(CC, dtype=torch.float64)", python=("PPt",)),
    Piece("plain tensor written in place", f"self.PPt.mul_(0.9).add_(0.1 * {MEAN})\nh = h - self.PPt.clone()",
          "self.PPt = torch.zeros(CC, dtype=torch.float64)", python=("PPt",)),
    Piece("cache of the shape", "if self.PPmask is None or self.PPmask.shape[0] != h.shape[0]:\n"
          "    self.PPmask = h.new_ones(h.shape[0], 1, 1)\nh = h * self.PPmask", "self.PPmask = None"),
    Piece("state of an object", "self.PPk.n += 1\nh = h * (1 + 0.1 * self.PPk.n)", "self.PPk = PPHolder()",
          "class PPHolder:\n    def __init__(self):\n        self.n = 0", python=("PPk",)),
    Piece("config written", "self.PPcfg.last = h.shape[0]\nh = h * 2",
          "self.PPcfg = types.SimpleNamespace(last=0)", python=("PPcfg",)),
    Piece("python random", "if random.random() < 0.5:\n    h = torch.tanh(h)"),
    Piece("numpy random", "h = h * float(np.random.rand())"),
    Piece("random layer", "if not self.training or torch.rand(()) < 0.5:\n    h = torch.tanh(h)"),
)  # fmt: skip

PIECES = BUFFERS + READ + WRITTEN
