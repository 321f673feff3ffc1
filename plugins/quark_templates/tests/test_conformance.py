"""Every template that this distribution registers passes the conformance suite."""

import pytest

from quark_devkit import TemplateConformance
from quark_templates.plugin import quark_register_templates

# Whole runs with all algorithms are made of the first family of each lineage, and slow of the others, which
# are quantized and read back in one scheme each by the other tests of this folder.
_lineages: set[str] = set()
for record in quark_register_templates():
    lineage = str(record.architecture).partition(":")[0]
    marks = [pytest.mark.slow_runs] if lineage in _lineages else []
    _lineages.add(lineage)
    globals()[f"Test_{record.name}"] = type(f"Test_{record.name}", (TemplateConformance,), {"subject": record.name, "pytestmark": marks})
