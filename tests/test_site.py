"""The site's configuration names every page, every page is in its navigation, and its links can be followed."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
CONFIG = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))


def named(entry: Any) -> list[str]:
    """Pages of the navigation, in its order."""
    if isinstance(entry, str):
        return [entry]
    return [page for inner in (entry.values() if isinstance(entry, dict) else entry) for page in named(inner)]


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    """docs/site/hooks.py; mkdocs, which is no part of the tests, has no more than its place."""
    names = ("mkdocs", "mkdocs.structure", "mkdocs.structure.files")
    before = {name: sys.modules.get(name) for name in names}
    sys.modules.update({name: ModuleType(name) for name in names})
    sys.modules[names[-1]].File = sys.modules[names[-1]].Files = object  # type: ignore[attr-defined]
    spec = importlib.util.spec_from_file_location("site_hooks", ROOT / "docs" / "site" / "hooks.py")
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    for name, module in before.items():
        sys.modules.pop(name) if module is None else sys.modules.update({name: module})
    return found


def test_every_page_is_in_the_navigation_once(hooks: ModuleType) -> None:
    pages = {p.name for p in (ROOT / "docs").glob("*.md")} | set(hooks.OUTSIDE.values())
    navigation = named(CONFIG["nav"])
    assert sorted(navigation) == sorted(pages)
    assert all((ROOT / source).is_file() for source in hooks.OUTSIDE)
    assert sorted(p.name for p in (ROOT / "benchmarks").glob("*.md")) == ["README.md", "RESULTS.md"]  # both outside


def test_every_page_is_in_the_index_of_the_documentation(hooks: ModuleType) -> None:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    for name in (p.name for p in (ROOT / "docs").glob("*.md") if p.name != "README.md"):
        assert f"]({name})" in index, f"docs/README.md does not name {name}"


def test_links_move_with_their_pages(hooks: ModuleType) -> None:
    def moved(text: str, page: str) -> str:
        return hooks.on_page_markdown(text, SimpleNamespace(file=SimpleNamespace(src_uri=page)), None, None)

    assert moved("[a](cli.md#run)", "guide.md") == "[a](cli.md#run)"
    assert moved("[a](../benchmarks/RESULTS.md#on-one-gpu)", "guide.md") == "[a](benchmarks/RESULTS.md#on-one-gpu)"
    assert moved("[a](../docs/cli.md#ops)", "benchmarks/RESULTS.md") == "[a](../cli.md#ops)"
    assert moved("[a](docs/cli.md) [b](CONTRIBUTING.md)", "overview.md") == "[a](cli.md) [b](contributing.md)"
    assert moved("[a](../examples/hf_trainer.py)", "integrations.md") == "[a](files/examples/hf_trainer.py.txt)"
    assert moved('<img src="docs/plan-page.png">', "overview.md") == '<img src="plan-page.png">'
    assert moved("[a](https://x.org/y) [b](#here)", "overview.md") == "[a](https://x.org/y) [b](#here)"
    assert moved("```python no-run\n[a](../x.md)\n```", "guide.md") == "```python\n[a](../x.md)\n```"


def test_anchors_are_named_as_the_other_tests_have_them(hooks: ModuleType) -> None:
    pages = [*(ROOT / "docs").glob("*.md"), *(ROOT / source for source in hooks.OUTSIDE)]
    for page in pages:
        for heading in re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE):
            assert hooks.slug(heading, "-") == re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
