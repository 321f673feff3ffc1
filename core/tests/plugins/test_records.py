"""Records: allowed values of fields, and values that are refused when a record is made."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import quark
from quark.config.tensor import QTensorConfig
from quark.errors import PluginError
from quark.plugins import (
    API_VERSION,
    CAPABILITIES,
    AlgorithmRecord,
    Catalog,
    ExporterRecord,
    FormatRecord,
    ObserverRecord,
    Option,
    algorithms,
)
from quark.plugins.catalog import catalog
from quark_workbench.cli.installed import plugins_report


def transform(**more: Any) -> AlgorithmRecord:
    """A transform named ``acme``."""
    return AlgorithmRecord(**({"name": "acme", "kind": "transform", "config": "acme_quant.algorithm:AcmeConfig"} | more))


def test_a_transform_says_what_it_does_and_where_it_goes() -> None:
    record = transform(role="equalization", before=["gptq"], after=("rotation",))
    assert (record.role, record.before, record.after) == ("equalization", ("gptq",), ("rotation",))
    assert (transform().role, transform().before, transform().after) == (None, (), ())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"role": "Two words"}, "role 'Two words' is not a name"),
        ({"before": ("Two words",)}, "before 'Two words' is not a name"),
        ({"after": (3,)}, "after 3 is not a name"),
        ({"before": "rotation"}, r"'rotation' is one string instead of several: write \('rotation',\)"),
        ({"kind": "rounding", "role": "equalization"}, "'acme' is a rounding: leave them out"),
        ({"kind": "rounding", "after": ("rotation",)}, "'acme' is a rounding: leave them out"),
        ({"before": ("acme",)}, "cannot run before or after 'acme'"),
        ({"aliases": ("ac",), "after": ("ac",)}, "cannot run before or after 'ac'"),
        ({"role": "rotation", "after": ("rotation",)}, "cannot run before or after 'rotation'"),
        ({"before": ("rotation",), "after": ("rotation",)}, "cannot run both before and after 'rotation'"),
    ],
)
def test_a_place_in_the_order_that_cannot_be_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        transform(**fields)


def test_the_built_in_transforms_declare_what_a_run_orders_them_by() -> None:
    by_name = {record.name: record for record in algorithms()}
    assert (by_name["rotation"].role, by_name["rotation"].before) == ("rotation", ("equalization",))
    assert {name for name, record in by_name.items() if record.role == "equalization"} >= {"awq", "smoothquant", "autosmoothquant"}
    assert by_name["gptq"].role is None


PERCENT = Option("percent", float, 99.9, "Of the values.")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"capabilities": ["calibraton"]}, "'calibraton' is not a capability; did you mean 'calibration'"),
        ({"capabilities": "calibration"}, "one string instead of several"),
        ({"capabilities": [3]}, "3 is not a capability"),
        ({"capabilities": ["sparse"]}, "'sparse' is not a capability.*a vendor's own, 'vendor.name'"),
        ({"capabilities": ["acme.calibration", "acme.Sparse"]}, "'acme.Sparse' is not a capability"),
        ({"capabilities": ["acme.sparse.weights"]}, "'acme.sparse.weights' is not a capability"),
        ({"options": ["percent"]}, r"options contains 'percent': write Option\(name, type, default, help\)"),
        ({"options": [PERCENT, PERCENT]}, "options contains the option 'percent' twice"),
    ],
)
def test_a_declaration_that_cannot_be_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        transform(**fields)


def test_a_kind_without_options_declares_none() -> None:
    with pytest.raises(ValueError, match="a FormatRecord has no options"):
        FormatRecord(name="x", bits=4, format="acme:X", options=[PERCENT])
    assert FormatRecord(name="x", bits=4, format="acme:X", options=()).options == ()


def test_declarations_are_values() -> None:
    record = transform(capabilities=["calibration", "acme.sparse"], options=[PERCENT])
    assert record.capabilities == frozenset({"calibration", "acme.sparse"})
    assert record.options == (PERCENT,)
    assert transform().options is None


DECLARING = """
    from quark.plugins import Option

    def build(size: int = 32, mode: str = "a"):
        pass

    {attribute}

    @hookimpl
    def quark_register_schemes():
        both = [Option("size", int, 32), Option("mode", str, "a", "Help.")]
        yield SchemeRecord(name="agrees", config=f"{{__name__}}:build", options=both)
        yield SchemeRecord(name="more", config=f"{{__name__}}:build", options=[Option("size", int, 32), Option("group", int, 1)])
        yield SchemeRecord(name="fewer", config=f"{{__name__}}:build", options=[Option("size", int, 32)])
        yield SchemeRecord(name="other", config=f"{{__name__}}:build", options=[Option("size", int, 64), Option("mode", str, "a")])
        yield SchemeRecord(name="derived", config=f"{{__name__}}:build")
"""


def declaring(site: Any, attribute: str = "") -> Catalog:
    site.install("acme-quant", DECLARING.format(attribute=attribute), version="0.1")
    return site.collect()  # type: ignore[no-any-return]


def test_declared_options_are_listed_without_the_code_and_others_are_derived(site: Any) -> None:
    schemes = declaring(site).schemes
    assert [str(option) for option in schemes.options("agrees")] == ["size=32 (int)", "mode='a' (str)"]
    assert schemes.options("agrees")[1].help == "Help."
    assert [option.name for option in schemes.options("derived")] == ["size", "mode"]
    assert schemes.load_config("agrees") is schemes.load_config("derived")


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("more", "has no option 'group', which its record declares"),
        ("fewer", "has the option 'mode', which its record does not declare"),
        ("other", r"has the option size=32 \(int\), which its record declares as size=64 \(int\)"),
    ],
)
def test_declared_options_that_the_code_does_not_have_are_a_defect_of_the_plugin(site: Any, name: str, complaint: str) -> None:
    with pytest.raises(PluginError, match=f"'config' of the scheme '{name}' points at .* which {complaint}.*acme-quant 0.1"):
        declaring(site).schemes.load_config(name)


@pytest.mark.parametrize("stated", [API_VERSION, (1, API_VERSION), [API_VERSION, API_VERSION + 7]])
def test_a_plugin_for_this_plugin_api_is_used_and_its_range_is_known(site: Any, stated: Any) -> None:
    catalog = declaring(site, f"QUARK_API = {stated}")
    source = catalog.schemes.source("agrees")
    assert catalog.api(source) == ((stated, stated) if isinstance(stated, int) else tuple(stated))
    assert catalog.failures() == ()
    assert source not in catalog.unstated()


@pytest.mark.parametrize(
    ("attribute", "error"),
    [
        (f"QUARK_API = {API_VERSION + 1}", f"it is written for version {API_VERSION + 1} of the plugin API, and this"),
        (
            f"QUARK_API = ({API_VERSION + 1}, {API_VERSION + 2})",
            f"for version {API_VERSION + 1} to {API_VERSION + 2} of the plugin API, and",
        ),
        *(
            (f"QUARK_API = {value}", r"its QUARK_API is not valid: .*\(lowest, highest\)")
            for value in ("'new'", "(1, 2, 3)", "True", "(0, 2)", "(3, 2)", "()")
        ),
    ],
)
def test_a_plugin_for_another_plugin_api_is_left_out(site: Any, attribute: str, error: str) -> None:
    catalog = declaring(site, attribute)
    assert catalog.schemes.names() == ["good"]
    (failure,) = catalog.failures()
    assert failure.stage == "require"
    assert re.search(error, failure.error)
    (told,) = plugins_report(catalog)["failures"]
    assert (told["error"], told["fix"]) == (failure.error, failure.fix)
    assert "update quark-core" in told["fix"] or "write QUARK_API = (lowest, highest)" in told["fix"]
    with pytest.raises(PluginError, match=error):
        site.collect(QUARK_STRICT_PLUGINS="1")


def test_a_record_of_a_class_with_a_constructor_of_its_own_is_kept(site: Any) -> None:
    site.install(
        "acme-quant",
        """
        QUARK_API = (2, 2)

        class Own(SchemeRecord):
            def __init__(self, name):
                super().__init__(name=name, config="json:dumps")

        @hookimpl
        def quark_register_schemes():
            yield Own("own")
            broken = scheme("broken")
            object.__setattr__(broken, "stability", "1 to 2")
            yield broken
            yield scheme("last")
        """,
    )
    catalog = site.collect()
    assert catalog.schemes.names() == ["good", "last", "own"]
    assert [failure.stage for failure in catalog.failures()] == ["validate"]


def test_every_built_in_record_says_for_which_plugin_api_it_was_written() -> None:
    registries = (quark.formats(), quark.observers(), quark.schemes(), quark.algorithms(), quark.templates(), quark.exporters())
    assert catalog().unstated() == ()
    assert {name for registry in registries for record in registry for name in record.capabilities} == set(CAPABILITIES)


@pytest.mark.parametrize("record", list(quark.formats()), ids=lambda record: record.name)
def test_formats_that_declare_zero_points_have_them(record: FormatRecord) -> None:
    number_format = quark.formats().load_format(record.name)
    spec = QTensorConfig(dtype=record.name, qscheme="per_tensor", symmetric=False, is_dynamic=False)
    possible = number_format.spec_error(spec) is None
    qparams = number_format.qparams(torch.tensor(0.0), torch.tensor(3.0), spec) if possible else None
    assert (qparams is not None and qparams.zero_point is not None) == ("zero_point" in record.capabilities)


@pytest.mark.parametrize("record", list(quark.algorithms()), ids=lambda record: record.name)
def test_algorithms_that_declare_calibration_need_statistics(record: AlgorithmRecord) -> None:
    processor = quark.algorithms().load_processor(record.name)
    settings = quark.algorithms().load_config(record.name).for_architecture(quark.templates().load_architecture("llama"))
    needs_data = record.kind == "block_tuning" or bool(processor(settings).needs)
    assert needs_data == ("calibration" in record.capabilities)


@pytest.mark.parametrize("record", [r for r in quark.exporters() if r.exporter is not None], ids=lambda record: record.name)
def test_exporters_that_declare_streaming_can_stream(record: ExporterRecord) -> None:
    assert quark.exporters().load_exporter(record.name).streams == ("streaming" in record.capabilities)


@pytest.mark.parametrize("record", list(quark.observers()), ids=lambda record: record.name)
def test_declared_options_of_observers_are_those_of_their_classes(record: ObserverRecord) -> None:
    observer = quark.observers().load_observer(record.name)
    assert [option.name for option in quark.observers().options(record.name)] == list(getattr(observer, "options", ()))


def test_what_a_rounding_excludes_has_a_reason_and_is_of_roundings_alone() -> None:
    fields: dict[str, Any] = {"name": "a", "config": "a.b:C", "processor": "a.b:D"}
    record = AlgorithmRecord(kind="rounding", excluded_schemes={"int4": "it has no scales"}, worst_ratio=1.1, **fields)
    assert dict(record.excluded_schemes) == {"int4": "it has no scales"}
    with pytest.raises(ValueError, match="gives no reason for 'int4'"):
        AlgorithmRecord(kind="rounding", excluded_schemes={"int4": " "}, **fields)
    with pytest.raises(ValueError, match="only roundings have"):
        AlgorithmRecord(kind="transform", excluded_schemes={"int4": "it has no scales"}, **fields)
    with pytest.raises(ValueError, match="worst_ratio"):
        AlgorithmRecord(kind="rounding", worst_ratio=0.5, **fields)
