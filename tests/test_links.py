"""Links of the documentation lead to pages and sections that there are; so does what code and charts name."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = {".md", ".py", ".yaml", ".json", ".txt", ".tpl", ".toml"}
BLOCK = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?P<path>[^)\s#]*)(?:#(?P<anchor>[^)\s]+))?\)")
MENTION = re.compile(r"(?<![\w./-])(?P<path>docs/[\w/-]+\.md)(?:#(?P<anchor>[\w-]*\w))?")


@cache
def files() -> tuple[Path, ...]:
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode != 0:
        pytest.skip("no checkout of the repository")
    paths = [ROOT / name for name in listed.stdout.splitlines()]
    return tuple(path for path in paths if path.suffix in SOURCES and path.is_file())


def anchors(text: str) -> set[str]:
    """What GitHub makes of the headings of a page."""
    found: set[str] = set()
    numbers: Counter[str] = Counter()
    for title in re.findall(r"^#{1,6} (.*)$", BLOCK.sub("", text), re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).lower()
        name = re.sub(r"[^\w\- ]", "", plain).strip().replace(" ", "-")
        found.add(f"{name}-{numbers[name]}" if numbers[name] else name)
        numbers[name] += 1
    return found


@cache
def anchors_of(page: Path) -> frozenset[str]:
    return frozenset(anchors(page.read_text(encoding="utf-8")))


def broken(targets: Iterator[tuple[Path, str | None, str]]) -> list[str]:
    """Those that are not there, by the texts that name them."""
    return [
        text
        for target, anchor, text in targets
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors_of(target))
    ]


def links(page: Path) -> Iterator[tuple[Path, str | None, str]]:
    prose = re.sub(r"`[^`\n]*`", "", BLOCK.sub("", page.read_text(encoding="utf-8")))
    for match in LINK.finditer(prose):
        if ":" not in match["path"]:
            target = page.parent / match["path"] if match["path"] else page
            yield target, match["anchor"], f"{page.relative_to(ROOT)}: {match[0]}"


def mentions(source: Path) -> Iterator[tuple[Path, str | None, str]]:
    for match in MENTION.finditer(source.read_text(encoding="utf-8")):
        yield ROOT / match["path"], match["anchor"], f"{source.relative_to(ROOT)}: {match[0]}"


def test_links_lead_somewhere() -> None:
    pages = [path for path in files() if path.suffix == ".md"]
    assert len(pages) > 30
    assert [text for page in pages for text in broken(links(page))] == []


def test_pages_that_are_named_are_there() -> None:
    sources = [path for path in files() if path != Path(__file__)]
    assert [text for source in sources for text in broken(mentions(source))] == []


def test_what_does_not_lead_anywhere_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.test_links.ROOT", tmp_path)
    page, source = tmp_path / "page.md", tmp_path / "source.py"
    page.write_text(
        "# A `b`, c: [d](page.md)\n\n```\n# no heading\n[no](link.md)\n```\n## Twice\n## Twice\n"
        "[there](#a-b-c-d) [there](page.md#twice-1) [elsewhere](https://example.com/x.md#y)\n"
        "[gone](#no-heading) [gone](other.md) [gone](page.md#twice-2)\n"
    )
    source.write_text('"""See docs/page.md#there, docs/page.md#gone and docs/other.md; not /docs/x.md."""\n')
    assert broken(links(page)) == [
        "page.md: ](#no-heading)",
        "page.md: ](other.md)",
        "page.md: ](page.md#twice-2)",
    ]
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "page.md").write_text("# There\n")
    assert broken(mentions(source)) == ["source.py: docs/page.md#gone", "source.py: docs/other.md"]
