"""Schemes by name: registering, unregistering, and refused arguments."""

from __future__ import annotations

import pytest

from quark.config.layer import QLayerConfig
from quark.config.templates import LLMTemplate, QuantizationScheme, QuantizationSchemeCollection
from quark.config.tensor import QTensorConfig
from quark.errors import ConfigError, PluginError, UnknownNameError
from quark.plugins import SchemeRecord, Source, schemes

OWN = QLayerConfig(weight=QTensorConfig(dtype="int8"))


def test_a_scheme_registered_by_a_program_serves_every_template_until_it_is_taken_away(template: LLMTemplate) -> None:
    LLMTemplate.register_scheme("Custom int8", config=OWN)
    assert LLMTemplate.get_supported_schemes()[-1] == "Custom int8"
    assert template.get_config(scheme="Custom int8").global_quant_config == OWN
    assert LLMTemplate("mine").get_config(scheme="acme_w4", layer_config={"*": "Custom int8"}).layer_quant_config == {"*": OWN}
    LLMTemplate.unregister_scheme("Custom int8")
    with pytest.raises(ValueError, match="Unsupported quantization scheme: Custom int8"):
        template.get_config(scheme="Custom int8")


@pytest.mark.parametrize("name", ["acme_w4", "acme_four"])
def test_a_name_that_is_taken_cannot_be_registered(name: str) -> None:
    with pytest.raises(ValueError, match=f"Scheme '{name}' already registered, please use a different name."):
        LLMTemplate.register_scheme(name, config=OWN)


def test_a_program_cannot_register_a_name_twice() -> None:
    LLMTemplate.register_scheme("own", config=OWN)
    with pytest.raises(ConfigError, match="already registered"):
        LLMTemplate.register_scheme("own", config=OWN)


def test_a_scheme_without_a_layer_configuration_is_refused() -> None:
    with pytest.raises(ConfigError, match="must be a QLayerConfig"):
        LLMTemplate.register_scheme("own", config="int8")  # type: ignore[arg-type]


def test_a_plugins_scheme_cannot_be_unregistered() -> None:
    with pytest.raises(ValueError, match="Scheme 'acme_w4' not registered as custom scheme, quark built-in schemes cannot be unregistered"):
        LLMTemplate.unregister_scheme("acme_w4")


def test_an_unknown_scheme_cannot_be_unregistered() -> None:
    LLMTemplate.register_scheme("own_one", config=OWN)
    with pytest.raises(UnknownNameError, match=r"Scheme 'own_ome' not found, please check the name\. \(did you mean 'own_one'"):
        LLMTemplate.unregister_scheme("own_ome")


def test_a_collection_sees_what_plugins_register_later() -> None:
    collection = QuantizationSchemeCollection()
    assert set(schemes().names()) <= set(collection.get_supported_schemes())
    assert collection.get_scheme("acme_w4").config.weight is not None
    assert collection.get_scheme("acme_w4").config is not collection.get_scheme("acme_w4").config


def test_the_base_class_of_schemes_gives_a_configuration_of_its_own_each_time() -> None:
    scheme = QuantizationScheme(OWN)
    assert scheme.config == OWN
    scheme.config.weight = None
    assert scheme.config == OWN


def test_aliases_are_among_the_supported_schemes() -> None:
    supported = QuantizationSchemeCollection().get_supported_schemes()
    assert "fp4_block16_scale_e4m3" in supported
    assert len(set(supported)) == len(supported)
    assert all(QuantizationSchemeCollection().get_scheme(name) for name in supported)


def _raising() -> QLayerConfig:
    raise KeyError("no such thing")


def _wanting(size: int) -> QLayerConfig:
    return QLayerConfig()


def _dict() -> dict[str, int]:
    return {"weight": 3}


@pytest.mark.parametrize(
    ("function", "complaint"),
    [
        ("_raising", "raised KeyError: 'no such thing'"),
        ("_wanting", "raised TypeError: .*missing 1 required positional argument"),
        ("_dict", "builds a dict instead of a QLayerConfig"),
    ],
)
def test_a_scheme_whose_function_fails_is_named(function: str, complaint: str, template: LLMTemplate) -> None:
    schemes().register(SchemeRecord(name="acme_fails", config=f"{__name__}:{function}"), Source("broken-quant", "0.3"))
    try:
        with pytest.raises(PluginError, match=f"^the scheme 'acme_fails' of broken-quant 0.3 {complaint}"):
            template.get_config("acme_fails")
    finally:
        schemes().unregister("acme_fails")


def test_a_scheme_at_run_time_has_a_layer_configuration_and_no_options() -> None:
    from types import SimpleNamespace

    from quark.config.templates.schemes import scheme_config

    collection = QuantizationSchemeCollection()
    with pytest.raises(ConfigError, match="the scheme 'no_layer' must be a QLayerConfig, not 3"):
        collection.register_scheme("no_layer", SimpleNamespace(config=3))  # type: ignore[arg-type]
    collection.register_scheme("of_run_time", SimpleNamespace(config=QLayerConfig()))  # type: ignore[arg-type]
    try:
        with pytest.raises(ConfigError, match="'of_run_time' was registered at run time and has no options: leave scheme_options out"):
            scheme_config("of_run_time", {"group_size": 32})
    finally:
        collection.unregister_scheme("of_run_time")
