"""Scripts of examples/scripts: what autopar changes in each, and that it trains, saves and resumes as one device."""

from __future__ import annotations

import difflib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "examples" / "scripts"
STYLES = ("nanogpt", "llama2c", "mingpt", "titan")
MOST = 5
"""Changed lines of a script."""

LOSS = re.compile(r"^(iter |step:? |validate |\d+ \|)(.*?)loss[: ]+([\d.]+)(?:, val loss ([\d.]+))?", re.MULTILINE)


def changes(style: str) -> list[str]:
    """Lines of the script that become others (one, with its replacement, if it has one), without empty ones."""
    plain, own = ((SCRIPTS / style / name).read_text().splitlines() for name in ("train.py", "train_autopar.py"))
    found = []
    for kind, a, b, c, d in difflib.SequenceMatcher(None, plain, own, autojunk=False).get_opcodes():
        if kind != "equal":
            before, after = ([x for x in lines if x.strip()] for lines in (plain[a:b], own[c:d]))
            found += [f"-{x}" for x in before] + [f"+{x}" for x in after]
    return found


def count(lines: list[str]) -> int:
    """Changed lines: what is taken out and what comes in its place count once."""
    return max(sum(x.startswith(sign) for x in lines) for sign in "+-")


@pytest.mark.parametrize("style", STYLES)
def test_few_lines_change_and_the_page_shows_them(style: str) -> None:
    lines = changes(style)
    assert 0 < count(lines) <= MOST
    page = (ROOT / "docs" / "scripts.md").read_text(encoding="utf-8")
    (block,) = re.findall(rf"<!-- {style} -->\n```diff\n(.*?)```", page, re.DOTALL)
    assert block.splitlines() == lines, "docs/scripts.md shows other lines: put these in\n" + "\n".join(lines)
    assert f"| {style} | {count(lines)} |" in page


def test_a_line_that_changes_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "SCRIPTS", tmp_path)
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "train.py").write_text("a\nb\nc\n")
    (tmp_path / "x" / "train_autopar.py").write_text("a\nB\n\nc\nd\n")
    assert changes("x") == ["-b", "+B", "+d"] and count(changes("x")) == 2


DATA = str(ROOT / "LICENSE")
OPTIONS = {
    "nanogpt": ([f"--dataset={DATA}", "--dtype=float64"], "--out_dir={}", "--max_iters={}", ["--init_from=resume"]),
    "llama2c": (["--data", DATA, "--dtype", "float64"], "--out-dir={}", "--max-iters={}", ["--resume"]),
    "mingpt": (["--double"], "--work-dir={}", "--max-iters={}", ["--resume"]),
    "titan": (["--data", DATA, "--dtype", "float64"], "--checkpoint-folder={}", "--steps={}", ["--load-step=20"]),
}


def losses(style: str, folder: Path, steps: int, processes: int, *, resume: bool) -> dict[str, tuple[float, ...]]:
    """What a run prints: losses by the step."""
    data, into, until, again = OPTIONS[style]
    words = [*data, into.format(folder), until.format(steps), *(again if resume else [])]
    launcher = [sys.executable, "train.py"]
    if processes:
        run = ["-m", "autopar.cli", "run", "--quiet", "--nproc", str(processes)]
        launcher = [sys.executable, *run, "train_autopar.py"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    options = {"capture_output": True, "text": True, "timeout": 550, "check": False}
    done = subprocess.run([*launcher, *words], cwd=SCRIPTS / style, env=environment, **options)  # type: ignore[call-overload]
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    found = {}
    for match in LOSS.finditer(done.stdout):
        step = match[1] + match[2].split(":")[0].strip("| ")
        found[step] = tuple(float(value) for value in match.groups()[2:] if value)
    return found


@pytest.mark.deep
@pytest.mark.distributed
@pytest.mark.parametrize("style", STYLES)
def test_as_on_one_device(style: str, tmp_path: Path) -> None:
    """Twenty steps on four ranks, four more on two from what these have saved; and both by the plain script."""
    plain = losses(style, tmp_path / "plain", 20, 0, resume=False)
    assert len(plain) >= 20
    found = losses(style, tmp_path / "four", 20, 4, resume=False)
    assert found.keys() == plain.keys()
    for step, values in plain.items():
        assert found[step] == pytest.approx(values, abs=2e-9), step
    plain = losses(style, tmp_path / "plain", 24, 0, resume=True)
    found = losses(style, tmp_path / "four", 24, 2, resume=True)
    assert len(plain) >= 4 and found.keys() == plain.keys()
    for step, values in plain.items():
        assert found[step] == pytest.approx(values, abs=2e-9), step


@pytest.mark.deep
@pytest.mark.distributed
@pytest.mark.parametrize("style", ["nanogpt", "titan"])
def test_under_autocast(style: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, *rest = OPTIONS[style]
    monkeypatch.setitem(OPTIONS, style, ([w.replace("float64", "bfloat16") for w in data], *rest))
    plain = losses(style, tmp_path / "plain", 6, 0, resume=False)
    found = losses(style, tmp_path / "two", 6, 2, resume=False)
    assert len(plain) >= 6 and found.keys() == plain.keys()
    for step, values in plain.items():
        assert found[step] == pytest.approx(values, rel=3e-3), step
