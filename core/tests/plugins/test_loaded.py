"""The object that a record points at is checked when it is loaded: its kind, and that it agrees with the
record."""

from __future__ import annotations

from typing import Any

import pytest

from quark.errors import PluginError

PLUGIN = """
    from quark.plugins import AlgorithmRecord, ExporterRecord, ObserverRecord, TemplateRecord

    @hookimpl
    def quark_register_formats():
        yield FormatRecord(name="class-quant", bits=4, format="quark_schemes.formats.integer:IntegerFormat")
        yield FormatRecord(name="number-quant", bits=4, format="math:pi")
        yield FormatRecord(name="int-four", bits=4, format="quark_schemes.formats.integer:INT4")
        yield FormatRecord(name="int4", bits=5, format="quark_schemes.formats.integer:INT4")
        yield FormatRecord(name="int8", bits=8, format="quark_schemes.formats.integer:INT8")

    @hookimpl
    def quark_register_observers():
        yield ObserverRecord(name="dict", class_name="dict", observer="builtins:dict")
        yield ObserverRecord(name="misnamed", class_name="Other", observer="quark_schemes.observers.min_max:PlaceholderObserver")

    @hookimpl
    def quark_register_schemes():
        yield SchemeRecord(name="no-function", config="math:pi")

    @hookimpl
    def quark_register_algorithms():
        yield AlgorithmRecord(name="br_a", kind="rounding", config="quark_algos.gptq.config:GPTQConfig", processor="math:pi")
        yield AlgorithmRecord(name="no-settings", kind="rounding", config="builtins:dict")
        yield AlgorithmRecord(name="no-restorer", kind="rounding", config="builtins:dict", restorer="builtins:dict")

    @hookimpl
    def quark_register_templates():
        yield TemplateRecord(name="no-facts", architecture="builtins:dict")

    @hookimpl
    def quark_register_exporters():
        yield ExporterRecord(name="no-export", exporter="builtins:dict")
"""


@pytest.mark.parametrize(
    ("kind", "name", "field", "complaint"),
    [
        (
            "formats",
            "class-quant",
            "format",
            r"is the class IntegerFormat instead of a value of .*NumberFormat: write IntegerFormat\(…\)",
        ),
        ("formats", "number-quant", "format", "is a float instead of a value of quark.numbers.number_format.NumberFormat"),
        ("formats", "int-four", "format", "says name='int4', but its record says name='int-four'"),
        ("formats", "int4", "format", r"says bits=4, but its record says bits=5"),
        ("observers", "dict", "observer", "is the class dict instead of a subclass of quark.numbers.observer.Observer"),
        ("observers", "misnamed", "observer", "says __name__='PlaceholderObserver', but its record says class_name='Other'"),
        ("schemes", "no-function", "config", "is a float instead of a callable"),
        ("algorithms", "br_a", "config", "says name.default='gptq', but its record says name='br_a'"),
        ("algorithms", "br_a", "processor", "is a float instead of a callable"),
        ("algorithms", "no-settings", "config", "is the class dict instead of a subclass of quark.config.algorithm.AlgoConfig"),
        ("algorithms", "no-restorer", "restorer", "has no 'restore' and no 'place_of'"),
        ("templates", "no-facts", "architecture", "is the class dict instead of a value of quark.config.architecture.Architecture"),
        ("exporters", "no-export", "exporter", "has no 'export'"),
    ],
)
def test_what_is_not_what_the_record_says_is_refused_by_name(kind: str, name: str, field: str, complaint: str, site: Any) -> None:
    site.install("acme-quant", PLUGIN, version="0.1")
    with pytest.raises(PluginError, match=complaint) as caught:
        getattr(site.collect().registries[kind], f"load_{field}")(name)
    assert f"'{field}' of the {kind.removesuffix('s')} '{name}' points at" in str(caught.value)
    assert "acme-quant 0.1" in str(caught.value)


def test_what_agrees_is_loaded(site: Any) -> None:
    site.install("acme-quant", PLUGIN)
    assert site.collect().registries["formats"].load_format("int8").bits == 8


def test_a_name_of_settings_may_be_an_alias() -> None:
    from quark.plugins import algorithms

    assert algorithms().get("smoothquant").aliases == ("smooth",)
    assert algorithms().load_config("smoothquant")().name == "smooth"
