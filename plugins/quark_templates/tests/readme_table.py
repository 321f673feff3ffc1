"""The table of families in README.md, from the tables of the plugin.

Run as a script, it rewrites the one in the file.
"""

from __future__ import annotations

import json
from pathlib import Path

from quark.plugins import TemplateRecord
from quark_templates import plugin

README = Path(__file__).parents[1] / "README.md"
START, END = "<!-- families: python tests/readme_table.py -->\n", "<!-- /families -->"
DOCUMENTED: list[str] = json.loads((Path(__file__).parent / "documented_types.json").read_text(encoding="utf-8"))
OWN_CODE, SKELETON, MISSING = "tiny model of transformers' own code", "module skeleton after published facts", "not there"


def tables() -> dict[str, dict[str, TemplateRecord]]:
    """The plugin's tables of families, by their names."""
    return {name: table for name, table in vars(plugin).items() if name.isupper() and isinstance(table, dict)}


def checked_on() -> dict[str, str]:
    """Return the model that checks the facts of each model type, documented ones without facts included."""
    there = {model_type: SKELETON if name == "REMOTE_CODE" else OWN_CODE for name, table in tables().items() for model_type in table}
    return dict.fromkeys(DOCUMENTED, MISSING) | there


def rendered() -> str:
    """The table, documented types first."""
    records = {model_type: record for table in tables().values() for model_type, record in table.items()}
    rows = sorted(checked_on().items(), key=lambda row: (row[0] not in DOCUMENTED, row[0]))
    lines = [f"| `{t}` | {_summary_and_file(records.get(t))} | {'yes' if t in DOCUMENTED else ''} | {what} |" for t, what in rows]
    return "\n".join(["| Model type | Models | File | Documented | Facts checked on |", "|---|---|---|---|---|", *lines]) + "\n"


def _summary_and_file(record: TemplateRecord | None) -> str:
    if record is None:
        return " | "
    module = record.architecture.target.partition(":")[0].rpartition(".")[2]
    return f"{record.summary} | `{module}.py`"


def parts(text: str) -> tuple[str, str, str]:
    """Return the text before the table, the table, and the text after it."""
    before, _, rest = text.partition(START)
    table, _, after = rest.partition(END)
    return before + START, table, END + after


if __name__ == "__main__":
    before, _, after = parts(README.read_text(encoding="utf-8"))
    README.write_text(before + rendered() + after, encoding="utf-8")
