"""`quark_templates.plugin`: what listing the templates imports, and what loading one does."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys

import pytest

import quark_templates
from quark.config.architecture import Architecture
from quark_templates.plugin import quark_register_templates

_LOADED = """
import sys
from quark_templates.plugin import quark_register_templates
records = {r.name: r for r in quark_register_templates()}
own, prefix = {"quark_templates.plugin"}, "quark_templates."
loaded = lambda: sorted(m.removeprefix(prefix) for m in sys.modules.keys() - own if m.startswith(prefix))
print(loaded())
records[%r].architecture.load()
print(loaded(), "torch" in sys.modules)
"""


@pytest.mark.parametrize(("model_type", "lineage"), [("llama", "llama"), ("grok-1", "other_mixtures"), ("qwen3_5_moe_text", "qwen")])
def test_listing_imports_no_lineage_and_loading_a_template_imports_its_own_without_torch(model_type: str, lineage: str) -> None:
    run = subprocess.run([sys.executable, "-c", _LOADED % model_type], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines() == ["[]", f"{sorted(['bases', lineage])} False"]


def test_every_architecture_of_a_lineage_is_registered_under_its_model_type_and_bases_are_not() -> None:
    modules = {m.name: importlib.import_module(f"quark_templates.{m.name}") for m in pkgutil.iter_modules(quark_templates.__path__)}
    written = {
        f"{module.__name__}:{name}": value.model_type
        for module in modules.values()
        for name, value in vars(module).items()
        if isinstance(value, Architecture) and value.model_type
    }
    assert {str(record.architecture): record.name for record in quark_register_templates()} == written
    assert {v.model_type for v in vars(modules["bases"]).values() if isinstance(v, Architecture)} == {""}
