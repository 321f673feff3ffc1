"""Every template that this distribution registers passes the conformance suite."""

import pytest
import transformers
from packaging.version import Version

from quark_devkit import TemplateConformance
from quark_templates.plugin import quark_register_templates

# Whole runs with all algorithms are made of the first family of each lineage, and slow of the others, which
# are quantized and read back in one scheme each by the other tests of this folder.
_lineages: set[str] = set()
_NAMED_SINCE = {"vit": "5.12"}
"""Release of transformers whose names a template has: facts of older models are inferred."""
for record in quark_register_templates():
    lineage = str(record.architecture).partition(":")[0]
    marks: list[pytest.MarkDecorator] = [pytest.mark.slow_runs] if lineage in _lineages else []
    if (since := _NAMED_SINCE.get(record.name)) is not None:
        is_older = Version(transformers.__version__) < Version(since)
        marks.append(pytest.mark.skipif(is_older, reason=f"transformers named the modules otherwise before {since}"))
    _lineages.add(lineage)
    globals()[f"Test_{record.name}"] = type(f"Test_{record.name}", (TemplateConformance,), {"subject": record.name, "pytestmark": marks})
