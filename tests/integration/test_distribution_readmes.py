"""Code in the READMEs of the exporters and of the tiny model runs as it stands."""

from __future__ import annotations

import re
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from quark.torch import LLMTemplate, ModelQuantizer
from quark_tiny_model import tiny_model

ROOT = Path(__file__).resolve().parents[2]


def run(document: str, **given: Any) -> dict[str, Any]:
    """Return the names that a document's first block of Python defines, in the setting of its text."""
    code = re.findall(r"```python\n(.*?)```", (ROOT / document).read_text(encoding="utf-8"), flags=re.DOTALL)[0]
    module = types.ModuleType("readme")
    module.__dict__.update(given)
    exec(compile(code, document, "exec"), module.__dict__)
    return module.__dict__


def test_the_exporters_readme_exports_a_model_and_reads_it_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = ModelQuantizer(LLMTemplate.get("llama").get_config("int4_wo_64")).quantize_model(tiny_model())
    again = run("plugins/quark_exporters/README.md", model=model)["again"]
    tokens = torch.arange(8)[None]
    with torch.no_grad():
        assert torch.equal(again(tokens).logits, model(tokens).logits)


def test_the_readme_of_the_tiny_model_loads_it() -> None:
    names = run("tiny_model/README.md")
    assert names["model"].config.model_type == "llama"
    assert len(names["batches"]) > 0
