"""For mkdocs: pages from outside of docs/, their links, and anchors as on GitHub. Nothing is written to docs/."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]

OUTSIDE = {
    "README.md": "overview.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/README.md": "benchmarks/README.md",
    "benchmarks/RESULTS.md": "benchmarks/RESULTS.md",
}
"""Pages of the site by their files."""

LINK = re.compile(r"(\]\(|src=\"|href=\")([^)\s\"#]+)(#[^)\s\"]*)?(?=[)\"])")


def slug(heading: str, separator: str) -> str:
    """The name of a heading's anchor, as on GitHub; tests/test_docs.py has the same."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", separator)


def on_config(config: Any) -> Any:
    """Before anything is read."""
    config.mdx_configs.setdefault("toc", {})["slugify"] = slug
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the pages of `OUTSIDE`, and each other file that a page links to."""
    for source, target in OUTSIDE.items():
        files.append(File.generated(config, target, content=(ROOT / source).read_text(encoding="utf-8")))
    pages = {ROOT / "docs" / f.src_uri for f in files.documentation_pages() if f.src_uri not in OUTSIDE.values()}
    for page in sorted({*pages, *(ROOT / source for source in OUTSIDE)}):
        for name in linked(page):
            if files.get_file_from_path(target_of(name)) is None:
                files.append(File.generated(config, target_of(name), content=_listing(ROOT / name)))
    return files


def linked(page: Path) -> list[str]:
    """Files and folders of this repository, besides pages, that a page links to."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    found = {_repository_path(page.relative_to(ROOT).as_posix(), m[2]) for m in LINK.finditer(text)}
    return sorted(n for n in found if n and not n.endswith(".md") and not n.startswith("docs/") and (ROOT / n).exists())


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links to files outside of docs/ become links within the site; words behind a block's language are for tests."""
    site = page.file.src_uri
    source = next((s for s, target in OUTSIDE.items() if target == site), f"docs/{site}")
    parts = re.split(r"(^```.*?^```$)", markdown, flags=re.DOTALL | re.MULTILINE)
    for i, part in enumerate(parts):
        if i % 2:
            parts[i] = re.sub(r"\A```(\S+)[^\n]*", r"```\1", part)
        else:
            parts[i] = LINK.sub(lambda m: _moved(m, source, site), part)
    return "".join(parts)


def _moved(match: re.Match[str], source: str, site: str) -> str:
    name = _repository_path(source, match[2])
    if not name or not (ROOT / name).exists():
        return match[0]
    target = posixpath.relpath(target_of(name), posixpath.dirname(site) or ".")
    return f"{match[1]}{target}{match[3] or ''}"


def target_of(name: str) -> str:
    """Where a file of the repository is on the site."""
    if name in OUTSIDE:
        return OUTSIDE[name]
    if name.startswith("docs/"):
        return name.removeprefix("docs/") or "README.md"
    return f"files/{name}.txt"


def _repository_path(source: str, link: str) -> str:
    """The file that a link of a page leads to; empty: none of this repository."""
    if re.match(r"[a-z]+:", link) or link.startswith("/"):
        return ""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
    return "docs/README.md" if path == "docs" else path


def _listing(path: Path) -> str:
    """A file's text, or that of all files of a folder."""
    if path.is_file():
        return path.read_text(encoding="utf-8")
    inside = sorted(p for p in path.rglob("*.py") if "__pycache__" not in p.parts)
    return "\n\n".join(f"# {p.relative_to(ROOT).as_posix()}\n{p.read_text(encoding='utf-8')}" for p in inside)
