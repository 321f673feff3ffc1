"""Sources use the words of the glossary in ARCHITECTURE.md, and cite only what a reader can find."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted(p for pattern in ("*/src", "plugins/*/src", "examples/*/src") for p in ROOT.glob(f"{pattern}/**/*.py"))
DOCUMENTS = sorted(
    p for p in ROOT.rglob("*.md") if not any(part.startswith(".") and part != ".github" for part in p.relative_to(ROOT).parts)
)

# A word that the glossary replaces, and the word to write. Only words that have no other meaning in this code are here.
REPLACED = {
    r"culprit": "cause",
    r"foreseen": "expected, or quantized skeleton",
    r"told\s+of": "reported, or warned of",
    r"verdict": "validation",
    r"settle[sd]?": "canonicalize, resolve, or merge",
    r"stations?": "pause point",
    r"moment\s+of\s+the\s+inputs": "Hessian",
}
UNPUBLISHED = re.compile(
    r"[Ss]pec of the\s+(documented\s+surface|checkpoint\s+format|algorithms)|/(?:home|root)/|/tmp/(?!reference|golden)"
)


NO_VERB = re.compile(
    r"An?|The|All|Any|Every|Each|Some|Both|One|Two|Its|This|That|These|Those|Whether|What|Which|Why|How|Where|When|While|If"
    r"|At|By|For|From|In|On|Of|Up|Not|Nothing|Full|Plain|Own|Other"
)
"""Words that begin a phrase without a verb in front: articles, numbers, prepositions, and those of indirect questions."""


def begins_with_a_verb(docstring: str) -> bool:
    """Whether a docstring seems to begin with a verb in the imperative, so not with `NO_VERB`, a plural or "name of"; or with "As `…`"."""
    first, second = [*docstring.split(), ""][:2]
    if first == "As" and second.startswith("`"):
        return True
    is_plural = first.endswith("s") and not first.endswith("ss")
    is_word = re.fullmatch(r"[A-Z][a-z]+(-[a-z]+)?[,:]?", first) is not None
    return is_word and NO_VERB.fullmatch(first) is None and not is_plural and (second != "of" or first == "Warn")


def functions_without_a_verb(path: Path) -> list[str]:
    """``file:line: text`` of docstrings of functions that do not begin with a verb; properties, which are values, may."""
    functions = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.FunctionDef)]
    plain = [f for f in functions if not any(ast.unparse(d) in {"property", "cached_property"} for d in f.decorator_list)]
    texts = [(f, ast.get_docstring(f)) for f in plain]
    return [f"{path.relative_to(ROOT)}:{f.lineno}: {t.splitlines()[0]}" for f, t in texts if t and not begins_with_a_verb(t)]


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
    (tmp_path / "a.py").write_text('"""One.\n\nSource: spec of the documented\nsurface, §1.\n"""\n')
    assert lines_with(UNPUBLISHED, [tmp_path / "a.py"]) == ["a.py:3: spec of the documented surface"]


def test_sources_cite_only_documents_that_a_reader_can_find() -> None:
    assert lines_with(UNPUBLISHED, SOURCES) == []


def test_documents_cite_only_documents_that_a_reader_can_find() -> None:
    assert lines_with(UNPUBLISHED, DOCUMENTS) == []


def test_sources_use_the_words_of_the_glossary() -> None:
    assert lines_with(re.compile(rf"(?i)\b({'|'.join(REPLACED)})\b"), SOURCES) == []


def test_the_glossary_is_in_order_and_explains_each_term_once() -> None:
    glossary = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8").partition("## Glossary")[2]
    terms = [re.sub(r"[`]", "", row) for row in re.findall(r"^\| ([^|]+?) \| [^|]+ \|$", glossary, flags=re.MULTILINE)][1:]
    assert len(terms) >= 30
    assert terms == sorted(set(terms), key=lambda term: term.lower().replace("_", " ").replace("-", " "))


@pytest.mark.parametrize(
    "text", ["Return the scale.", "Yield rows, in order.", "Pass it on.", "Warn of a rule.", "As `Exporter.export`.", "Undo `pack`."]
)
def test_a_docstring_that_begins_with_a_verb_is_known(text: str) -> None:
    assert begins_with_a_verb(text)


@pytest.mark.parametrize(
    "text", ["The scale.", "Names of layers.", "Shape of x.", "Whether it fits.", "``x``, sorted.", "INT4 weights.", "As written."]
)
def test_a_docstring_that_begins_otherwise_is_known(text: str) -> None:
    assert not begins_with_a_verb(text)


@pytest.mark.parametrize("path", [p for p in SOURCES if "quark_devkit" not in p.parts], ids=lambda p: str(p.relative_to(ROOT)))
def test_docstrings_of_functions_begin_with_a_verb(path: Path) -> None:
    assert functions_without_a_verb(path) == []
