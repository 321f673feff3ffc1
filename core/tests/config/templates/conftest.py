"""Registered schemes, algorithms and a template of the fictitious family ``acme_net``, none built in."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType

import attrs
import pytest

from quark.config.algorithm import AlgoConfig
from quark.config.architecture import Architecture
from quark.config.layer import QLayerConfig
from quark.config.templates import LLMTemplate
from quark.config.tensor import QTensorConfig
from quark.plugins import AlgorithmRecord, SchemeRecord, Source, TemplateRecord, algorithms, schemes, templates

MODULE = "acme_world_of_tests"
SOURCE = Source("acme-quant", "1.0")
W4 = QTensorConfig(dtype="int4", qscheme="per_group", ch_axis=-1, group_size=32, is_dynamic=False)
A8 = QTensorConfig(dtype="fp8_e4m3", qscheme="per_tensor", is_dynamic=False)
NETWORK = Architecture(
    model_type="acme_net",
    decoder_blocks="net.blocks",
    attention_inputs=("attn.q_proj", "attn.k_proj", "attn.v_proj"),
    attention_output="attn.o_proj",
    kv_layers_name=("*k_proj", "*v_proj"),
    q_layer_name="*q_proj",
    exclude_layers_name="head",
)


@attrs.define(kw_only=True)
class AcmeConfig(AlgoConfig):
    """An algorithm that derives its settings from a family's facts."""

    name: str = "acme_runs"
    blocks: str | None = None
    strength: float = 1.0

    @classmethod
    def for_architecture(cls, architecture: Architecture) -> AcmeConfig | None:
        return cls(blocks=architecture.decoder_blocks)


@attrs.define(kw_only=True)
class BareConfig(AlgoConfig):
    """An algorithm that derives no settings: its layers have to be named."""

    name: str = "acme_bare"
    layers: list[str]


@attrs.define(kw_only=True)
class PlainConfig(AlgoConfig):
    """An algorithm whose settings all have defaults."""

    name: str = "acme_plain"
    strength: float = 0.5


@attrs.define(kw_only=True)
class TalkingConfig(AcmeConfig):
    """Settings of an algorithm that has no processor."""

    name: str = "acme_talks"


def _records() -> Iterator[SchemeRecord | AlgorithmRecord | TemplateRecord]:
    at = f"{MODULE}:"
    yield SchemeRecord(name="acme_w4", aliases=("acme_four",), config=f"{at}w4")
    yield SchemeRecord(name="acme_w8a8", config=f"{at}w8a8", kv_cache=f"{at}a8", attention=f"{at}a8")
    yield SchemeRecord(name="acme_shared", config=f"{at}w4", shares_global_scale=True)
    yield SchemeRecord(name="acme_broken", config=f"{at}w4", kv_cache=f"{at}w4")
    yield AlgorithmRecord(name="acme_runs", aliases=("acme_walks",), kind="rounding", config=f"{at}AcmeConfig", processor=f"{at}AcmeConfig")
    yield AlgorithmRecord(name="acme_bare", kind="rounding", config=f"{at}BareConfig", processor=f"{at}BareConfig")
    yield AlgorithmRecord(name="acme_plain", kind="rounding", config=f"{at}PlainConfig", processor=f"{at}PlainConfig")
    yield AlgorithmRecord(name="acme_talks", kind="transform", config=f"{at}TalkingConfig")
    yield TemplateRecord(name="acme_net", architecture=f"{at}NETWORK")


@pytest.fixture(autouse=True)
def acme_world() -> Iterator[None]:
    module = ModuleType(MODULE)
    module.__dict__.update(
        w4=lambda: QLayerConfig(weight=W4),
        w8a8=lambda: QLayerConfig(weight=A8, input_tensors=A8),
        a8=lambda: A8,
        AcmeConfig=AcmeConfig,
        BareConfig=BareConfig,
        PlainConfig=PlainConfig,
        TalkingConfig=TalkingConfig,
        NETWORK=NETWORK,
    )
    sys.modules[MODULE] = module
    registries = {SchemeRecord: schemes(), AlgorithmRecord: algorithms(), TemplateRecord: templates()}
    records = list(_records())
    for record in records:
        registries[type(record)].register(record, SOURCE)  # type: ignore[arg-type]
    yield
    for registry in (schemes(), algorithms(), templates()):
        for name in registry.run_time_names():
            registry.unregister(name)
    for record in records:
        registries[type(record)].unregister(record.name)
    del sys.modules[MODULE]


@pytest.fixture
def template() -> LLMTemplate:
    return LLMTemplate.get("acme_net")
