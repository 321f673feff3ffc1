"""Warn of prose that people would have to read twice: ``python -m tools.docs.prose [FILE …]``.

The program checks each line of Markdown outside code. It warns of several sentences in a line, of a long line
or sentence, and of words in `VOCABULARY`, and gives advice. The exit status is always 0.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator

from tools.docs.sections import ROOT

__all__ = ["LONGEST_LINE", "MOST_WORDS", "VOCABULARY", "warnings"]

MOST_WORDS = 40
LONGEST_LINE = 110
"""Characters, without the addresses of links."""
VOCABULARY = {
    r"\bthose (of|that)\b": "name the thing again",
    r"\b(of|by|from|with) which\b": "start a new sentence",
    r"\bwhat (is|was|are|were) \w+(ed|en)\b": "use a noun",
    r"\b(where|whereas) (they|this|these|those|one)\b": "write 'if', or name the place",
    r"\bin place of\b": "write 'instead of'",
    r"\bgo(es)? on\b": "write 'continue'",
    r"\bthe (former|latter)\b": "name the thing again",
    r"\bdo(es)? no more than\b": "say what happens",
}
"""Pattern and advice."""
_CODE = re.compile(r"^```.*?^```$|^\$\$.*?^\$\$$|<!--.*?-->", flags=re.MULTILINE | re.DOTALL)
_NO_PROSE = re.compile(r"^(#|\||:::|\{\{|\$\$|!\[|\s*$)")
_SENTENCE_END = re.compile(r"[.!?](?=\s+[A-Z`*])")


def warnings(text: str) -> Iterator[tuple[int, str]]:
    """Yield warnings about the prose of a document, each with the number of its line.

    Args:
        text: A document in Markdown.
    """
    without_code = _CODE.sub(lambda match: "\n" * match[0].count("\n"), text)
    for number, line in enumerate(without_code.splitlines(), 1):
        if _NO_PROSE.match(line):
            continue
        plain = re.sub(r"`[^`]*`|\]\([^)]*\)", "x", line)
        is_list = bool(re.match(r"\s*([-*]|\d+\.) ", plain))
        sentences = _SENTENCE_END.split(re.sub(r"\be\.g\. |\bi\.e\. |^\s*\d+\. ", "", plain))
        if len(sentences) > 1 and not is_list:
            yield number, f"{len(sentences)} sentences in a line: write one a line"
        if (length := len(re.sub(r"\]\([^)]*\)", "]", line))) > LONGEST_LINE:
            yield number, f"{length} characters: break the line, or say less"
        if longest := [words for one in sentences if (words := len(one.split())) > MOST_WORDS]:
            yield number, f"a sentence of {max(longest)} words: make two"
        yield from ((number, f"'{found[0]}': {advice}") for pattern, advice in VOCABULARY.items() for found in re.finditer(pattern, plain))


def main() -> None:
    tracked = ["git", "ls-files", "*.md"]
    named = sys.argv[1:] or subprocess.run(tracked, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
    for name in named:
        for number, warning in warnings((ROOT / name).read_text(encoding="utf-8")):
            print(f"{name}:{number}: {warning}")


if __name__ == "__main__":
    main()
