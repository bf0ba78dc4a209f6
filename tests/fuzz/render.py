"""The Python source of a case: definitions, ``build()``, ``batch()`` and the loop ``drive(model, original)``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from random import Random
from textwrap import indent

from tests.fuzz.boundary import filled
from tests.fuzz.case import BY_NAME, OUTPUT, SIGNATURE, Block, Case
from tests.fuzz.piece import At, Piece

STEP = "    "
PRELUDE = Path(__file__).with_name("prelude.py")


@dataclass(frozen=True)
class Body:
    """A block's text."""

    pieces: tuple[Piece, ...]
    top: tuple[str, ...]
    init: str
    call: str
    behind: At


def body_of(block: Block, number: int, at: At, original: bool) -> Body:
    """A block where the activation has certain sizes."""
    name = f"b{number}"
    inner = {"root": "", "child": f".{name}", "nested": f".{name}.inner", "twice": f".{name}"}[block.place]
    module = ("original" if original else "model") if block.place == "root" else f"model{inner}"
    pieces, first = [], at
    for i, (piece, seed) in enumerate(block.pieces):
        pieces.append(BY_NAME[piece].rendered(f"p{number}{'abcdefgh'[i]}_", module, at, seed))
        at = BY_NAME[piece].after(at)
    top = tuple(p.top for p in pieces if p.top)
    init = "\n".join(p.init for p in pieces if p.init)
    forward = "\n".join(p.forward for p in pieces)
    if block.place == "root":
        return Body(tuple(pieces), top, init, forward, at)
    inside = _module(f"Block{number}", init, "h", f"{forward}\nreturn h")
    make = f"Block{number}()"
    if block.place == "nested":
        inside += "\n\n\n" + _module(f"Outer{number}", f"self.inner = Block{number}()", "h", "return self.inner(h)")
        make = f"Outer{number}()"
    call = f"h = self.{name}(h)" + (f"\nh = self.{name}(h)" if block.place == "twice" else "")
    return Body(tuple(pieces), (*top, inside), f"self.{name} = {make}", call, at if block.place != "twice" else first)


def _module(name: str, init: str, parameters: str, forward: str) -> str:
    lines = [f"class {name}(nn.Module):", f"{STEP}def __init__(self):", f"{STEP * 2}super().__init__()"]
    lines += [indent(init, STEP * 2)] if init else []
    return "\n".join([*lines, "", f"{STEP}def forward(self, {parameters}):", indent(forward, STEP * 2)])


def bodies_of(case: Case) -> list[Body]:
    """Every block of a case in order."""
    at, bodies = At(case.length, case.channels), []
    for number, block in enumerate(case.blocks):
        bodies.append(body_of(block, number, at, case.original))
        at = bodies[-1].behind
    return bodies


def source(case: Case) -> str:
    """All but the prelude."""
    bodies = bodies_of(case)
    signature = SIGNATURE[case.signature].rendered(case.seed)
    output = OUTPUT[case.output].rendered(case.seed)
    last = bodies[-1].behind.channels if bodies else case.channels
    init = f"self.first = nn.Linear({case.channels}, {case.channels})\n" + "\n".join(b.init for b in bodies if b.init)
    init += f"\nself.last = nn.Linear({last}, 3)"
    init += "\nself.scale = nn.Parameter(torch.tensor(0.3))" if "self.scale" in output.finish else ""
    init += "\nself.register_buffer('seen', torch.ones(2))" if "self.seen" in output.finish else ""
    keep = "h0 = h\n" if "h0" in output.finish else ""
    forward = "\n".join(
        [signature.take, keep + "h = self.first(h)", *(b.call for b in bodies), "h = self.last(h)", output.finish]
    )
    tops = [
        signature.top,
        output.top,
        *(t for b in bodies for t in b.top),
        _module("Model", init, signature.parameters, forward),
    ]
    loss = output.loss if output.loss != "loss" else "loss_of(out)"
    functions = [
        f"def build():\n{STEP}seed({case.seed})\n{STEP}return Model().double()",
        f"def batch():\n{indent(_prepare(case, 0), STEP)}\n{STEP}return {_sized(signature.batch, case, 0)}",
        f"def value_of(out):\n{STEP}return {loss}",
        f"def drive(model, original):\n{indent(_loop(case, bodies, loss), STEP)}",
    ]
    text = "\n\n\n".join([t.strip("\n") for t in [*tops, *functions] if t]) + "\n"
    return re.sub(r"\n\n+(?= {8})", "\n", text)  # blocks without statements


def _sized(text: str, case: Case, number: int) -> str:
    marks = {"ROWS": case.calls[number].rows, "SS": case.length, "CC": case.channels, "II": number}
    for mark, value in marks.items():
        text = text.replace(mark, str(value))
    return text


def _prepare(case: Case, number: int) -> str:
    lines = f"x = randn({number + 1}, ROWS, SS, CC)\n{SIGNATURE[case.signature].prepare}"
    return _sized(lines.strip("\n"), case, number)


def _loop(case: Case, bodies: list[Body], loss: str) -> str:
    pieces = [p for b in bodies for p in b.pieces]
    lines = ["log = {}", f"optimizer = {case.optimizer}", *(p.start for p in pieces if p.start)]
    python = tuple(f"{p_path}{n}" for b, block in zip(bodies, enumerate(case.blocks), strict=True)
                   for p in b.pieces for n in p.python for p_path in [_path(*block)])  # fmt: skip
    aux = "".join(f" + {p.aux}" for p in pieces if p.aux)
    names = f", {python!r}" if python else ""
    for number, call in enumerate(case.calls):
        lines.append(f"# call {number}")
        lines += [pieces[i].change for i in call.changes if i < len(pieces) and pieces[i].change]
        lines += [_prepare(case, number)]
        lines += ["model.train()" if call.training else "model.eval()"] if number or not call.training else []
        arguments = filled(SIGNATURE[case.signature].call, Random(f"{case.seed} {number}").randrange(10**6))
        lines += [f"seed({number})"]
        if call.gradient:
            lines += [f"out = model({_sized(arguments, case, number)})", f"loss = {loss}{aux}", "loss.backward()"]
            lines += [f"record(log, 'call {number}', model, out, loss{names})"]
        else:
            lines += ["with torch.no_grad():", f"{STEP}out = model({_sized(arguments, case, number)})"]
            lines += [f"record(log, 'call {number}', model, out, None{names})"]
        if call.gradient and call.step:
            lines += ["optimizer.step()", "optimizer.zero_grad()"]
    return "\n".join([*lines, "record_state(log, 'at last', model)", "return log"])


def _path(number: int, block: Block) -> str:
    return {"root": "", "child": f"b{number}.", "nested": f"b{number}.inner.", "twice": f"b{number}."}[block.place]


ENDS = {
    "one": """
if __name__ == "__main__":
    model, given = build(), build()
    expected = drive(model, model)
    found = drive(autopar.parallelize(given, None), given)
    print("\\n".join(differences(expected, found)) or "equal")
""",
    "regions": """
if __name__ == "__main__":
    model, given = build(), build()
    expected = drive(model, model)
    found = drive(autopar.parallelize(given, None, compile=lambda graph, values: graph.forward), given)
    print("\\n".join(differences(expected, found)) or "equal")
""",
    "compiled": """
if __name__ == "__main__":
    model, given = build(), build()
    expected = drive(model, model)
    found = drive(autopar.parallelize(given, None, compile=True), given)
    print("\\n".join(differences(expected, found)) or "equal")
""",
    "plans": """
if __name__ == "__main__":
    report = autopar.verify(build(), batch(), {axes}, loss_fn={loss_fn}, plan="random", seed={seed})
    print(report.worst, report.max_error, report.capture_error)
    model = build()
    seed(0)
    value_of(model(*batch()) if isinstance(batch(), tuple) else model(**batch())).backward()
    expected = {{n: p.grad for n, p in model.named_parameters() if p.grad is not None}}
    print("\\n".join(differences(expected, {{n: report.gradients[n] for n in expected}})) or "equal")
""",
    "ranks": """
if __name__ == "__main__":  # torchrun --nproc-per-node {ranks}
    torch.distributed.init_process_group("gloo")
    mesh = torch.distributed.init_device_mesh("cpu", {sizes}, mesh_dim_names={names})
    model, given = build(), build()
    expected = drive(model, model)
    search = autopar.Search(recipe="random", seed={seed})
    found = drive(autopar.parallelize(given, mesh, search=search, deterministic=True, timeout=60), given)
    print("\\n".join(differences(expected, found)) or "equal")
    torch.distributed.destroy_process_group()
""",
}


def script(case: Case, mode: str = "one", **values: object) -> str:
    """A program that stands alone and prints what differs."""
    end = ENDS[mode].format(**values) if mode != "one" else ENDS["one"]
    prelude = PRELUDE.read_text().replace("import torch\n", "import torch\n\nimport autopar\n", 1)
    return f"{prelude}\n\n{source(case)}\n{end}"
