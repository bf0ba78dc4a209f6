"""The examples of the documentation run, its links lead somewhere, and the names and messages in it exist."""

import ast
import io
import pkgutil
import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from typer.testing import CliRunner

from autopar import (
    cli,
    strategies,  # noqa: F401 (or the first page would register its rules for itself)
)
from autopar.rules import rule as strategy

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TEXTS = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "benchmarks").glob("*.md"))]

SAY_WHAT_IS_BEST = ("concepts.md", "memory.md")  # pages whose examples go by the best plan that is found

LONG = ("cli.md", "goals.md", "memory.md")  # pages that take half a minute

NO_RUN = "no-run"  # needs several processes or a GPU: only compiled


class Block(NamedTuple):
    """A fenced block: ``language``, the words behind it, its text, and the line where the text begins."""

    language: str
    words: tuple[str, ...]
    text: str
    line: int


def blocks(page: str) -> list[Block]:
    found = []
    for match in re.finditer(r"^```(\S+)([^\n]*)\n(.*?)^```$", page, re.DOTALL | re.MULTILINE):
        line = page[: match.start(3)].count("\n")
        found.append(Block(match[1], tuple(match[2].split()), match[3], line))
    return found


def commands(block: Block) -> list[list[str]]:
    """Arguments of each line that calls autopar."""
    lines = block.text.replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("autopar ")]


def run_page(path: Path, folder: Path) -> int:
    """Run a page's blocks in the folder, in order; returns how many ran."""
    names: dict[str, Any] = {"__name__": path.stem}
    compared = False  # the recipes beside a plan: of the first on the page
    cached = {"AUTOPAR_CACHE": str(folder / "plans")}  # as a user has it: a page plans the same model many times
    count = 0
    for block in blocks(path.read_text(encoding="utf-8")):
        if block.language == "python":
            files = [w.removeprefix("file=") for w in block.words if w.startswith("file=")]
            code = compile("\n" * block.line + block.text, str(path), "exec")
            if files:
                (folder / files[0]).write_text(block.text, encoding="utf-8")
            elif NO_RUN not in block.words:
                exec(code, names)
                count += 1
        elif block.language == "sh" and NO_RUN not in block.words:
            for arguments in commands(block):
                if arguments[0] == "plan" and compared and "--no-compare" not in arguments:
                    arguments = [*arguments, "--no-compare"]
                compared |= arguments[0] == "plan"
                result = CliRunner().invoke(cli.app, arguments, env=cached)
                assert result.exit_code == 0, f"{path.name}: autopar {shlex.join(arguments)}\n{result.output}"
                count += 1
    return count


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    path = list(sys.path)
    monkeypatch.setattr(strategy, "_RULES", dict(strategy._RULES))  # rules of examples have no samples
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.path[:] = path
    sys.modules.pop("model", None)


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(
            p,
            id=p.name,
            marks=[pytest.mark.thorough] * (p.name in SAY_WHAT_IS_BEST) + [pytest.mark.slow] * (p.name in LONG),
        )
        for p in PAGES
    ],
)
def test_the_examples_run(page: Path, folder: Path) -> None:
    with redirect_stdout(io.StringIO()):
        run_page(page, folder)


@pytest.mark.parametrize("page", TEXTS, ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("http://", "https://")):
            continue
        file, _, anchor = target.partition("#")
        found = (page.parent / file) if file else page
        assert found.exists(), f"{page.name} links to {target}, which does not exist"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", found.read_text(encoding="utf-8"), re.MULTILINE)
            slugs = {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}
            assert anchor in slugs, f"{page.name} links to {target}; {found.name} has {sorted(slugs)}"


@cache
def messages() -> frozenset[str]:
    """Every string of the sources, an f-string's fields as "…"; docstrings are no messages."""
    found = set[str]()
    for folder in ("autopar", "passes", "strategies"):
        for path in (ROOT / folder).rglob("*.py"):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            prose = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)}
            found |= {_text(n) for n in ast.walk(tree) if id(n) not in prose}
    return frozenset(found)


def _text(node: ast.AST) -> str:
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) or "…" for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def absent(page: str, known: frozenset[str]) -> list[str]:
    """Messages that a page quotes in the first column of its tables and that no string of the sources begins with."""
    quoted = [q for q in re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE) if " " in q]
    assert len(quoted) >= 20
    return [q for q in quoted if not any(message.startswith(q) for message in known)]


def test_quoted_messages_exist() -> None:
    assert absent((ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8"), messages()) == []


def lost_names(page: str) -> list[str]:
    """Paths in backticks that do not exist, and dotted names of autopar's that cannot be imported."""
    quoted = re.findall(r"`([^`\s]+)`", page)
    paths = [q for q in quoted if re.match(r"(autopar|passes|strategies|tests|benchmarks)/", q)]
    lost = [path for path in paths if not any(ROOT.glob(path.rstrip("/")))]
    for name in (q.removesuffix("()") for q in quoted if re.fullmatch(r"autopar(\.\w+)+(\(\))?", q)):
        try:
            pkgutil.resolve_name(name)
        except (ImportError, AttributeError):
            lost.append(name)
    return lost


@pytest.mark.parametrize("page", TEXTS, ids=lambda p: p.name)
def test_names_of_the_code_exist(page: Path) -> None:
    assert lost_names(page.read_text(encoding="utf-8")) == []


def test_a_name_that_is_gone_is_noticed() -> None:
    page = (
        "`autopar/compiler.py` `passes/` `autopar/solver.py` `autopar.verify.verify` `autopar.verify.gone()` `x/y.py`"
    )
    assert lost_names(page) == ["autopar/solver.py", "autopar.verify.gone"]


def test_a_message_that_is_gone_is_noticed() -> None:
    page = "| `the batch's contents differ: rank … has …, rank … has …` | | |\n" * 20 + "| `a message … of old` | | |\n"
    assert absent(page, messages()) == ["a message … of old"]


def test_every_command_and_option_is_documented() -> None:
    text = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    commands = ("plan", "migrate", "verify", "simulate", "ops", "doctor")
    help_ = {name: CliRunner().invoke(cli.app, [name, "--help"]).output for name in commands}
    options = {option for output in help_.values() for option in re.findall(r"--[a-z-]+", output)}
    assert {o for o in options if f"{o}`" not in text and f"{o} " not in text} == set()


def test_an_example_that_fails_is_noticed(folder: Path) -> None:
    page = folder / "page.md"
    page.write_text("text\n\n```python\nx = 1\n```\n\n```python no-run\n1 / 0\n```\n\n```python\nassert x == 2\n```\n")
    with pytest.raises(AssertionError):
        run_page(page, folder)
    page.write_text("```sh\nautopar plan --model absent.py:make --cluster cpu --axes a=2\n```\n")
    with pytest.raises(AssertionError, match=r"absent\.py"):
        run_page(page, folder)
    page.write_text("```python no-run\n1 +\n```\n")
    with pytest.raises(SyntaxError):
        run_page(page, folder)
