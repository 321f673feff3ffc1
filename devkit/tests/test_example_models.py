"""The model on which a template is checked does not depend on modules that were imported before."""

from __future__ import annotations

from pathlib import Path

import pytest

from quark.plugins import TemplateRecord
from quark.plugins.catalog import catalog
from quark_devkit.check import NotApplicableError
from quark_devkit.example_models import example_of
from quark_devkit.subject import Subject

MODELING = """
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

class LateConfig(LlamaConfig):
    model_type = "late_family"

class LateForCausalLM(LlamaForCausalLM):
    config_class = LateConfig

AutoConfig.register("late_family", LateConfig)
AutoModelForCausalLM.register(LateConfig, LateForCausalLM)
"""


def subject_of(name: str, modeling: str | None) -> Subject:
    record = TemplateRecord(name=name, architecture="quark_templates.llama:LLAMA", modeling=modeling)
    return Subject("template", name, "acme-quant", "1", record, catalog())


def test_the_module_of_a_model_class_is_imported_for_its_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "late_modeling.py").write_text(MODELING, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert type(example_of(subject_of("late_family", "late_modeling"))).__name__ == "LateForCausalLM"


def test_a_family_that_nobody_knows_is_told_what_is_missing() -> None:
    with pytest.raises(NotApplicableError, match=r"set TemplateRecord\(example="):
        example_of(subject_of("nobodys_family", None))
