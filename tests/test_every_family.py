"""Models of many families, all that can be quantized in them quantized, are loaded again as what was written.

Their own code looks at weights, dtypes and biases of layers, and is the judge here.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from quark.checkpoint import running_from_codes
from quark.config.layer import QLayerConfig
from quark.config.model import QConfig
from quark.models.layers import QuantizedLayer
from quark.models.layers.layer_types import planned_names
from quark.models.plan.inferred_architecture import infer_architecture
from quark.models.plan.rules import first_match
from quark.runs.from_disk import quantize_checkpoint
from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors, import_model_from_safetensors
from quark.torch.quantization import Int4PerChannelSpec
from tests.kit.small_families import FAMILIES, float_outputs, small_config, small_model

CODES = {
    "fp8": LLMTemplate.get("llama").get_config(scheme="ptpc_fp8").global_quant_config.weight,
    "int4": Int4PerChannelSpec(ch_axis=0, is_dynamic=False).to_quantization_spec(),
}
OTHER_KERNELS = {
    "Inkling2TextConfig": "convolutions",
    "JetMoeConfig": "products of grouped rows",
    "MobileNetV2Config": "convolutions",
    "PPLCNetConfig": "convolutions",
    "SiglipVisionConfig": "convolutions",
    "SqueezeBertConfig": "convolutions",
}
"""Families with results whose last bits depend on where a weight lies in memory, and why."""
if torch.__version__.startswith("2.10."):
    OTHER_KERNELS |= {"FalconH1Config": "convolutions", "FalconMambaConfig": "convolutions"}


def by_transformers(family: str, out: Path) -> nn.Module:
    model: nn.Module = getattr(transformers, FAMILIES[family]).from_pretrained(out, dtype="auto")
    return model


def by_transformers_from_codes(family: str, out: Path) -> nn.Module:
    with running_from_codes():
        return by_transformers(family, out)


def into_a_float_model(family: str, out: Path) -> nn.Module:
    return import_model_from_safetensors(getattr(transformers, FAMILIES[family])(small_config(family)), out)


def from_codes(family: str, out: Path) -> nn.Module:
    return import_model_from_safetensors(getattr(transformers, FAMILIES[family])(small_config(family)), out, packed=True)


WAYS: list[Callable[[str, Path], nn.Module]] = [by_transformers, by_transformers_from_codes, into_a_float_model, from_codes]


def aliases(model: nn.Module) -> set[frozenset[str]]:
    """Return the names of parameters that are one tensor. A weight that is computed from codes is what its codes are."""
    names_of: dict[tuple[int, ...], set[str]] = {}
    named = list(model.named_parameters(remove_duplicate=False))  # all at once: an id is that of a parameter that is there
    for name, parameter in named:
        owner, _, leaf = name.rpartition(".")
        buffers = model.get_submodule(owner)._buffers.items() if leaf == "weight" else ()
        codes = tuple(id(buffer) for buffer_name, buffer in buffers if buffer_name.startswith("packed_"))
        names_of.setdefault(codes or (id(parameter),), set()).add(name)
    return {frozenset(names) for names in names_of.values() if len(names) > 1}


def looks(model: nn.Module, layers: list[str]) -> dict[str, Any]:
    """What is seen of the parameters of some layers, in every way in which code looks at them."""
    named = dict(model.named_parameters(remove_duplicate=False))
    seen: dict[str, Any] = {}
    for name in layers:
        layer: Any = model.get_submodule(name)
        for leaf in ("weight", "bias"):
            parameter = getattr(layer, leaf, None)
            seen[f"{name}.{leaf}"] = parameter is not None
            if parameter is not None:
                shown = (parameter, model.get_parameter(f"{name}.{leaf}"), named[f"{name}.{leaf}"])
                assert all(isinstance(p, nn.Parameter) for p in shown)
                seen[f"{name}.{leaf}"] = [(p.dtype, p.device, p.shape, p.detach().clone()) for p in shown]
    return seen


def assert_same(found: Any, expected: Any) -> None:
    if isinstance(expected, Tensor):
        assert torch.equal(found, expected)
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for name in expected:
            assert_same(found[name], expected[name])
    elif isinstance(expected, list | tuple) and not isinstance(expected, torch.Size):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    else:
        assert found == expected


@pytest.mark.one_in(6)
@pytest.mark.parametrize("codes", CODES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_reloaded_model_computes_and_shows_what_was_written(family: str, codes: str, tmp_path: Path) -> None:
    if not hasattr(transformers, family):
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    weights = QLayerConfig(weight=CODES[codes])
    config = QConfig(weights, layer_type_quant_config=dict.fromkeys(planned_names(), weights))
    before = aliases(small_model(family))
    model = ModelQuantizer(config).quantize_model(small_model(family))
    layers = [name for name, layer in model.named_modules() if isinstance(layer, QuantizedLayer)]
    assert layers
    export_safetensors(model, tmp_path)
    expected, shown, kept = float_outputs(model), looks(model, layers), aliases(model)
    assert expected
    for way in WAYS:
        loaded = way(family, tmp_path)
        outputs = float_outputs(loaded)  # first: its own code looks at layers that nobody has called
        assert len(outputs) == len(expected), way
        for one, other in zip(outputs, expected, strict=True):
            same = torch.allclose(one, other, rtol=1e-5, atol=1e-5, equal_nan=True)
            assert same if family in OTHER_KERNELS else torch.equal(one.nan_to_num(), other.nan_to_num()), way
        assert_same(looks(way(family, tmp_path), layers), shown)
        assert {names for names in kept if not any(names <= again for again in aliases(loaded))} == set(), way
        assert all(any(names <= own for own in before) for names in aliases(loaded)), "nothing is tied that was not"


@pytest.mark.one_in(6)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_is_quantized_from_disk_as_in_memory(family: str, tmp_path: Path) -> None:
    if not hasattr(transformers, family):
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    small_model(family).save_pretrained(tmp_path / "float")  # type: ignore[operator]
    config = QConfig(QLayerConfig(weight=CODES["int4"]))
    quantize_checkpoint(tmp_path / "float", tmp_path / "disk", config)
    model = by_transformers(family, tmp_path / "float")
    export_safetensors(ModelQuantizer(config).quantize_model(model), tmp_path / "memory")
    in_memory, from_disk = ((tmp_path / place / "model.safetensors").read_bytes() for place in ("memory", "disk"))
    assert in_memory == from_disk


class ChoosesByTopK(TorchFunctionMode):
    """Finds the linear layers whose outputs go into a top-k, by elementwise operations alone."""

    _MIXES = frozenset({"linear", "matmul", "__matmul__", "bmm", "einsum", "embedding", "index_select", "scaled_dot_product_attention"})

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.found: set[str] = set()
        self._of: dict[int, set[str]] = {}
        self._alive: list[Tensor] = []
        for name, layer in model.named_modules():
            if isinstance(layer, nn.Linear):
                layer.register_forward_hook(lambda _, __, output, name=name: self._mark([output], {name}))

    def _mark(self, tensors: list[Any], names: set[str]) -> None:
        for tensor in (t for t in tensors if isinstance(t, Tensor) and names):
            self._alive.append(tensor)
            self._of[id(tensor)] = self._of.get(id(tensor), set()) | names

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = function(*args, **(kwargs or {}))
        names = set().union(*(self._of.get(id(value), set()) for value in tree_leaves((args, kwargs))))
        if function.__name__ == "topk":
            self.found |= names
        elif function.__name__ not in self._MIXES:
            self._mark(tree_leaves(output), names)
        return output


@pytest.mark.parametrize("family", ["AfmoeConfig", "HunYuanMoEV1Config", "JetMoeConfig"])
def test_layers_that_choose_experts_by_a_top_k_stay_float_in_families_without_a_template(family: str) -> None:
    model = small_model(family)
    with ChoosesByTopK(model) as mode:
        float_outputs(model)
    assert mode.found
    found = infer_architecture(model, family)
    assert found is not None
    assert [name for name in mode.found if first_match(name, found.exclude_layers_name) is None] == []
