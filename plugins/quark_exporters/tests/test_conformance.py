"""Every layout that this distribution writes passes the conformance suite."""

import pytest

from quark_devkit import LayoutConformance
from quark_exporters.plugin import quark_register_exporters

SLOW = {"onnx"}
"""Layouts that take seconds for each export, since a model is traced."""
LIKE_OTHERS = {"awq"}
"""Layouts with the base class of compressed_tensors and fp8; own tests read them back and dequantize them."""
OF_EVERY_SCHEME = {"safetensors"}
"""Layouts in which ``tests/test_run_from_codes.py`` has every scheme run from codes."""
WRITTEN = [record.name for record in quark_register_exporters() if record.exporter is not None]
for name in WRITTEN:
    marks = [pytest.mark.slow, pytest.mark.timeout(3600)] if name in SLOW else []
    marks += [pytest.mark.slow_runs] if name in LIKE_OTHERS else []
    marks += [pytest.mark.slow_runs("runs_from_codes")] if name in OF_EVERY_SCHEME else []
    globals()[f"Test_{name}"] = type(f"Test_{name}", (LayoutConformance,), {"subject": name, "pytestmark": marks})
