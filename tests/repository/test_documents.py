"""Sources and documents cite nothing that a reader cannot find, and the glossary explains each term once."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted(
    p for pattern in ("core/src", "plugins/*/src", "examples/*/src", "tiny_model/src") for p in ROOT.glob(f"{pattern}/**/*.py")
)
DOCUMENTS = sorted(
    p for p in ROOT.rglob("*.md") if not any(part.startswith(".") and part != ".github" for part in p.relative_to(ROOT).parts)
)

UNPUBLISHED = re.compile(
    r"[Ss]pec of the\s+(documented\s+surface|checkpoint\s+format|algorithms)|/(?:home|root)/|/tmp/(?!reference|golden)"
)


def lines_with(pattern: re.Pattern[str], paths: list[Path]) -> list[str]:
    """``file:line: text`` of each match."""
    texts = {path: path.read_text(encoding="utf-8") for path in paths}
    return [
        f"{path.relative_to(ROOT)}:{text.count(chr(10), 0, match.start()) + 1}: {' '.join(match.group().split())}"
        for path, text in texts.items()
        for match in pattern.finditer(text)
    ]


def test_a_match_may_span_lines_and_is_told_with_its_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    (tmp_path / "a.py").write_text('"""One.\n\nSource: spec of the documented\nsurface, §1.\n"""\n', encoding="utf-8")
    assert lines_with(UNPUBLISHED, [tmp_path / "a.py"]) == ["a.py:3: spec of the documented surface"]


def test_sources_cite_only_documents_that_a_reader_can_find() -> None:
    assert lines_with(UNPUBLISHED, SOURCES) == []


def test_documents_cite_only_documents_that_a_reader_can_find() -> None:
    assert lines_with(UNPUBLISHED, DOCUMENTS) == []


def test_the_glossary_is_in_order_and_explains_each_term_once() -> None:
    glossary = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8").partition("## Glossary")[2]
    terms = [re.sub(r"[`]", "", row) for row in re.findall(r"^\| ([^|]+?) \| [^|]+ \|$", glossary, flags=re.MULTILINE)][1:]
    assert len(terms) >= 30
    assert terms == sorted(set(terms), key=lambda term: term.lower().replace("_", " ").replace("-", " "))
