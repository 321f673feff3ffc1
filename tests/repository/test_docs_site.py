"""The built site: MkDocs warns of nothing, every link and anchor leads somewhere, and nothing comes from another host."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.documents
RESOURCES = {("script", "src"), ("link", "href"), ("img", "src"), ("iframe", "src"), ("source", "src")}


class Page(HTMLParser):
    """Links, anchors and resources of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.resources: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("id", "name"):
                self.anchors.add(value or "")
            if (tag, name) == ("a", "href"):
                self.links.append(value or "")
            if (tag, name) in RESOURCES:
                self.resources.append(value or "")


def built(out: Path, config: Path = ROOT / "mkdocs.yml") -> subprocess.CompletedProcess[str]:
    """Build the site as `make docs` does.

    Never with ``--quiet``: what is not shown is not counted, and nothing is strict.
    """
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", str(config), "--site-dir", str(out)]
    environ = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site")
    done = built(out)
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {path: Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}


@pytest.mark.parametrize(
    ("body", "warns"), [("width: Columns.", False), ("width, height: Columns and rows.", True)], ids=["sound", "an_argument_that_is_none"]
)
def test_a_docstring_that_names_no_argument_of_its_function_stops_the_build(body: str, warns: bool, tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/index.md").write_text("# One page\n\n::: small\n", encoding="utf-8")
    lines = ['"""A module."""', "def area(width: int) -> int:", '    """Return it.', "", "    Args:", f"        {body}", '    """']
    (tmp_path / "small.py").write_text("\n".join([*lines, "    return width"]) + "\n", encoding="utf-8")
    handler = f"{{python: {{paths: [{tmp_path}], options: {{docstring_style: google}}}}}}"
    (tmp_path / "mkdocs.yml").write_text(f"site_name: one\nplugins: [{{mkdocstrings: {{handlers: {handler}}}}}]\n", encoding="utf-8")
    done = built(tmp_path / "site", tmp_path / "mkdocs.yml")
    assert (done.returncode != 0) == warns, done.stderr


def test_every_page_of_the_sources_and_of_the_api_is_there(site: Path) -> None:
    from tools.docs import api

    sources = [p.relative_to(ROOT / "docs") for p in (ROOT / "docs").rglob("*.md")]
    assert all((site / path.with_suffix(".html")).is_file() for path in sources)
    assert all((site / page.path).with_suffix(".html").is_file() for page in api.pages())


def test_every_link_and_anchor_leads_somewhere(site: Path, pages: dict[Path, Page]) -> None:
    broken = []
    for path, page in pages.items():
        if path.name == "404.html":  # its links are from the root of a server
            continue
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            if not target.is_file() or (parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors):
                broken.append(f"{path.relative_to(site)}: {link}")
    assert broken == []


def test_pages_need_no_other_host(site: Path, pages: dict[Path, Page]) -> None:
    foreign = [f"{path.relative_to(site)}: {r}" for path, page in pages.items() for r in page.resources if urlsplit(r).netloc]
    assert foreign == []
    for style in site.rglob("*.css"):
        assert re.findall(r"(?:@import|url\()\s*[\"']?https?:", style.read_text(encoding="utf-8")) == []


def test_equations_are_mathml_and_none_is_left_in_tex(site: Path) -> None:
    text = (site / "explanation/algorithms.html").read_text(encoding="utf-8")
    assert text.count("<math") > 20
    assert "arithmatex" not in text
    assert "\\(" not in text
