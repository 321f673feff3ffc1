"""If a model cannot be quantized, an error names the layer before anything changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils._pytree import tree_map

from quark.config.layer import QLayerConfig
from quark.config.model import QConfig
from quark.config.tensor import QTensorConfig
from quark.errors import ConfigError
from quark.torch import ModelQuantizer, export_safetensors
from quark_tiny_model import tiny_model, tiny_template

WEIGHT = QTensorConfig("int8", "PerTensorMinMaxObserver", is_dynamic=False, qscheme="per_tensor", symmetric=True, round_method="half_even")
QUANTIZER = ModelQuantizer(QConfig(global_quant_config=QLayerConfig(weight=WEIGHT)))


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))


def with_weight(change: Callable[[Tensor], Tensor]) -> nn.Module:
    made = model()
    made[1].weight = nn.Parameter(change(made[1].weight.detach()), requires_grad=False)
    return made


UNFIT: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "float8": (lambda w: w.to(torch.float8_e4m3fn), "a weight of float8_e4m3fn"),
    "int8": (lambda w: w.to(torch.int8), "a weight of int8"),
    "complex": (lambda w: w.to(torch.complex64), "a weight of complex64"),
    "sparse": (lambda w: w.to_sparse(), "a sparse weight"),
    "meta": (lambda w: w.to("meta"), "on the meta device"),
    "another dtype than its bias": (lambda w: w.to(torch.bfloat16), "different dtypes"),
}


@pytest.mark.parametrize("case", UNFIT)
def test_weights_that_cannot_be_rounded_are_refused_and_nothing_is_changed(case: str) -> None:
    change, says = UNFIT[case]
    unfit = with_weight(change)
    first = unfit[0].weight.detach().clone()
    with pytest.raises(ConfigError, match=rf"1 layer\(s\) \(1\) have .*{says}"):
        QUANTIZER.quantize_model(unfit)
    assert type(unfit[0]) is nn.Linear
    assert torch.equal(unfit[0].weight, first)


@pytest.mark.parametrize("ask", [QUANTIZER.plan, QUANTIZER.quantize_model])
@pytest.mark.parametrize(("given", "says"), [(None, "not None"), ("org/model", "not the string 'org/model'"), (7, "not a int")])
def test_what_is_no_model_is_refused(ask: Callable[[Any], Any], given: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        ask(given)


def test_a_compiled_model_is_refused_as_a_whole_and_in_part() -> None:
    whole = torch.compile(model(), backend="eager")
    with pytest.raises(ConfigError, match="this model is compiled"):
        QUANTIZER.quantize_model(whole)
    part = nn.Sequential(model(), torch.compile(nn.Linear(4, 4), backend="eager"))
    with pytest.raises(ConfigError, match="'1' is compiled"):
        QUANTIZER.quantize_model(part)
    in_place = model()
    in_place[0].compile(backend="eager")
    with pytest.raises(ConfigError, match="'0' is compiled"):
        QUANTIZER.quantize_model(in_place)
    QUANTIZER.quantize_model(whole._orig_mod)


@pytest.mark.parametrize("ask", [QUANTIZER.plan, QUANTIZER.quantize_model])
def test_a_wrapper_for_several_devices_is_refused_as_a_whole_and_in_part(ask: Callable[[Any], Any]) -> None:
    wrapped = nn.DataParallel(model())
    with pytest.raises(ConfigError, match=r"this model is a DataParallel, which renames its layers. Quantize its attribute `module`"):
        ask(wrapped)
    with pytest.raises(ConfigError, match=r"^1 is a DataParallel"):
        ask(nn.Sequential(nn.Linear(4, 4), wrapped))
    assert not hasattr(wrapped.module[0], "weight_quantizer")
    QUANTIZER.quantize_model(wrapped.module)


def test_a_layer_whose_object_has_another_forward_is_refused() -> None:
    unfit = model()
    float_forward = unfit[1].forward
    unfit[1].forward = lambda x: 2 * float_forward(x)  # as hooks of accelerate do
    with pytest.raises(ConfigError, match=r"1 layer\(s\) \(1\) have a forward that was set on the object.*device_map"):
        QUANTIZER.quantize_model(unfit)
    assert type(unfit[0]) is nn.Linear
    del unfit[1].forward
    QUANTIZER.quantize_model(unfit)


@pytest.mark.parametrize("change", [nn.utils.weight_norm, lambda layer: prune.random_unstructured(layer, "weight", 0.5)])
@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated")
def test_a_layer_whose_weight_a_hook_computes_is_refused(change: Callable[[nn.Module], nn.Module]) -> None:
    unfit = model()
    change(unfit[1])
    with pytest.raises(ConfigError, match=r"1 layer\(s\) \(1\) have a weight that is no parameter.*remove_weight_norm or .*prune\.remove"):
        QUANTIZER.quantize_model(unfit)
    assert type(unfit[0]) is nn.Linear


class Wrapped(Tensor):
    """A tensor that stands for another, as a distributed or a quantized tensor does."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapped:
        made: Wrapped = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @classmethod
    def __tensor_unflatten__(cls, tensors: dict[str, Tensor], *_: object) -> Wrapped:
        return cls(tensors["inner"])

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*tree_map(lambda t: t.inner if isinstance(t, Wrapped) else t, args), **(kwargs or {}))
        return tree_map(lambda t: cls(t) if isinstance(t, Tensor) else t, result)


def test_a_weight_that_stands_for_another_tensor_is_refused() -> None:
    unfit = model()
    unfit[1].weight = nn.Parameter(Wrapped(unfit[1].weight.detach()), requires_grad=False)
    with pytest.raises(ConfigError, match=r"1 layer\(s\) \(1\) have a weight of the class Wrapped, which has no values of its own"):
        QUANTIZER.quantize_model(unfit)
    assert type(unfit[0]) is nn.Linear


def test_layers_of_different_dtypes_are_quantized_each_in_its_own() -> None:
    mixed = model()
    mixed[1].to(torch.bfloat16)
    alone = model()[1].to(torch.bfloat16)
    done = QUANTIZER.quantize_model(mixed)
    assert [layer.weight.dtype for layer in done] == [torch.float32, torch.bfloat16]
    assert torch.equal(done[1].weight, QUANTIZER.quantize_model(nn.Sequential(alone))[0].weight)


def test_a_model_with_an_adapter_is_refused_with_what_merges_it() -> None:
    kind = type("Linear", (nn.Module,), {"__module__": "peft.tuners.lora.layer"})
    unfit = model()
    unfit.add_module("2", kind())
    with pytest.raises(ConfigError, match=r"has a PEFT adapter \(2\).*merge_and_unload"):
        QUANTIZER.quantize_model(unfit)


def test_weights_of_inference_mode_are_told_and_the_mode_of_the_caller_is_left_for_the_run() -> None:
    with torch.inference_mode():
        unfit = model()
    with pytest.raises(ConfigError, match=r"a weight that was created in torch\.inference_mode\(\) and cannot be changed"):
        QUANTIZER.quantize_model(unfit)
    plain = model()
    with torch.inference_mode():
        quantized = QUANTIZER.quantize_model(plain)
        assert torch.is_inference_mode_enabled()
    assert not any(tensor.is_inference() for tensor in quantized.state_dict().values())


def test_an_export_that_is_read_again_is_told_to_be_quantized(tmp_path: Path) -> None:
    export_safetensors(ModelQuantizer(tiny_template().get_config("int4_wo_64")).quantize_model(tiny_model()), tmp_path / "out")
    again = type(tiny_model()).from_pretrained(tmp_path / "out")
    for ask in (ModelQuantizer(tiny_template().get_config("mxfp4")).quantize_model, QUANTIZER.plan):
        with pytest.raises(ConfigError, match=r"this model is quantized already: .*Load the float model"):
            ask(again)


def test_weights_that_are_tied_again_keep_the_rounded_head() -> None:
    model = tiny_model(kind="layernorm")
    assert model.config.tie_word_embeddings
    config, tied = tiny_template().get_config("int4_wo_64"), model.config
    config.exclude = []
    model = ModelQuantizer(config).quantize_model(model)
    assert tied.tie_word_embeddings  # another model may use it
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    rounded = head.weight.detach().clone()
    assert not torch.equal(rounded, embeddings.weight)
    model.tie_weights()
    assert torch.equal(head.weight, rounded)


def test_a_layer_that_is_replaced_after_quantization_is_not_exported(tmp_path: Path) -> None:
    config = tiny_template().get_config("int4_wo_64")
    config.exclude = []
    model = ModelQuantizer(config).quantize_model(tiny_model())
    model.resize_token_embeddings(model.config.vocab_size + 8)
    with pytest.raises(ConfigError, match=r"1 quantized layer\(s\) were replaced after quantization: lm_head\. Make such changes"):
        export_safetensors(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()
