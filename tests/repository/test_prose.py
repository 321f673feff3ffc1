"""The check of prose reads sentences outside code, and says what to write instead."""

from __future__ import annotations

import pytest

from tools.docs.prose import LONGEST_LINE, MOST_WORDS, VOCABULARY, warnings


@pytest.mark.parametrize(
    ("line", "warning"),
    [
        ("One idea. Another idea.", "2 sentences in a line: write one a line"),
        ("a " * (MOST_WORDS + 1), f"a sentence of {MOST_WORDS + 1} words: make two"),
        ("a" * (LONGEST_LINE + 1), f"{LONGEST_LINE + 1} characters: break the line, or say less"),
        ("It takes those of the model.", "'those of': name the thing again"),
    ],
)
def test_prose_that_is_read_twice_is_named_with_its_line(line: str, warning: str) -> None:
    assert list(warnings(f"# Title\n\n{line}\n")) == [(3, warning)]


@pytest.mark.parametrize(
    "text",
    [
        "```python\nthose of the model. Another.\n```\n",
        "| those of | x |\n",
        "# Those of. A title.\n",
        "`those of` stays. \n",
        "- One. Two.\n",
        f"[a]({'b' * LONGEST_LINE})\n",
    ],
)
def test_code_tables_and_headlines_are_no_prose(text: str) -> None:
    assert list(warnings(text)) == []


def test_the_line_behind_code_has_its_own_number() -> None:
    assert [number for number, _ in warnings("```text\na\nb\n```\nthe former\n")] == [5]


def test_each_pattern_of_the_vocabulary_has_an_advice() -> None:
    assert all(VOCABULARY.values())
