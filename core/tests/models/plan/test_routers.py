"""Routers are found by data flow: a layer whose outputs enter a top-k stays float, whatever its name."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.models.auto import CONFIG_MAPPING

from quark.checkpoint.export import export_with
from quark.models.hf.loading import load_model
from quark.models.hf.skeleton import meta_model
from quark.models.plan.family import template_of
from quark.models.plan.inferred_architecture import infer_architecture, layers_chosen_from
from quark.runs import ModelQuantizer, quantize_checkpoint
from quark_devkit.whole_runs import contents

WIDTH, EXPERTS, PADDED = 32, 4, 16


def route(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Choose two experts; a separate function of the router."""
    return torch.topk(logits[..., :EXPERTS].softmax(-1), 2)


class Mixture(nn.Module):
    """Four experts with names of their own, and a router whose name and width say nothing."""

    def __init__(self, config: Any = None, expert: str = "part{}", router: str = "foo") -> None:
        super().__init__()
        for i in range(EXPERTS):
            self.add_module(expert.format(i), nn.Linear(WIDTH, WIDTH, bias=False))
        self.experts = [expert.format(i) for i in range(EXPERTS)]
        self.shared = nn.Linear(WIDTH, WIDTH, bias=False)
        self.add_module(router, nn.Linear(WIDTH, PADDED, bias=False))
        self.router = router

    def logits(self, x: Tensor) -> Tensor:
        logits: Tensor = self.get_submodule(self.router)(x)
        return logits

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, WIDTH)
        weights, chosen = route(self.logits(flat))
        out = nn.functional.silu(self.shared(flat))
        for i in chosen.unique().tolist():  # which a tensor without values cannot say
            rows, places = torch.where(chosen == i)
            out = out.index_add(0, rows, self.get_submodule(self.experts[i])(flat[rows]) * weights[rows, places, None])
        return out.reshape(x.shape)


class InFloat32(Mixture):
    def logits(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x.float(), self.get_submodule(self.router).weight.float())


class ByProduct(Mixture):
    def logits(self, x: Tensor) -> Tensor:
        return torch.sigmoid(x @ self.get_submodule(self.router).weight.t()) + torch.arange(PADDED)


class OfTwoLayers(Mixture):
    """A router of two layers: only the last is a router, since its outputs are the choice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)

    def logits(self, x: Tensor) -> Tensor:
        return super().logits(torch.tanh(self.first(x)))


def chosen_in(module: nn.Module) -> set[str]:
    modules = dict(nn.ModuleDict({"block": module}).named_modules())
    return layers_chosen_from(modules, [name for name, layer in modules.items() if isinstance(layer, nn.Linear)])


@pytest.mark.parametrize("kind", [Mixture, InFloat32, ByProduct, OfTwoLayers])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_layer_from_whose_output_a_top_k_chooses_is_found(kind: type[nn.Module], device: str) -> None:
    with torch.device(device):
        module = kind().to(torch.bfloat16)
    assert chosen_in(module) == {"block.foo"}


def test_a_layer_is_found_beside_others_of_another_width() -> None:
    module = Mixture()
    module._modules = {"first": nn.Linear(WIDTH // 2, WIDTH), **module._modules}  # reads something else
    assert chosen_in(module) == {"block.foo"}


def test_nothing_is_chosen_from_where_no_top_k_is() -> None:
    assert chosen_in(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))) == set()

    class Raises(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.foo = nn.Linear(8, 8)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            raise AssertionError

    assert chosen_in(Raises()) == set()


def test_what_a_module_raises_is_logged_with_what_follows(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="quark"):
        assert chosen_in(Mixture()) == {"block.foo"}
    assert "a Mixture cannot run separately on the meta device" in caplog.text
    assert "Its routers are inferred from names, widths and the operations before the error" in caplog.text


def test_the_model_is_not_touched() -> None:
    module, called = Mixture(), []
    module.foo.register_forward_hook(lambda *_: called.append(1))  # type: ignore[union-attr]
    before = {name: tensor.clone() for name, tensor in module.train().state_dict().items()}
    assert chosen_in(module) == {"block.foo"}
    assert module.training
    assert not called
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    assert all(parameter.requires_grad for parameter in module.parameters())


class Translator(nn.Module):
    """An encoder of mixtures, and a decoder without."""

    def __init__(self) -> None:
        super().__init__()
        blocks = {"encoder": Mixture, "decoder": lambda: nn.Linear(WIDTH, WIDTH)}
        for side, kind in blocks.items():
            self.add_module(side, nn.ModuleDict({"layers": nn.ModuleList(nn.ModuleDict({"mlp": kind()}) for _ in range(2))}))
        self.config = SimpleNamespace(is_encoder_decoder=True, encoder_layers=2, decoder_layers=2)

    def get_output_embeddings(self) -> None:
        return None


def test_an_encoder_has_routers_of_its_own() -> None:
    found = infer_architecture(Translator(), "x")
    assert found is not None
    assert found.block_lists == ("encoder.layers", "decoder.layers")
    assert found.exclude_layers_name == ("*.mlp.foo",)


class AcmeConfig(LlamaConfig):
    model_type = "acme_routed"


class AcmeForCausalLM(LlamaForCausalLM):
    config_class = AcmeConfig

    def __init__(self, config: AcmeConfig) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp = Mixture(config)


@pytest.fixture
def acme() -> Iterator[None]:
    """A family that transformers knows and no template."""
    AutoConfig.register("acme_routed", AcmeConfig)
    AutoModelForCausalLM.register(AcmeConfig, AcmeForCausalLM)
    yield
    CONFIG_MAPPING._extra_content.pop("acme_routed")
    AutoModelForCausalLM._model_mapping._extra_content.pop(AcmeConfig)


@pytest.mark.usefixtures("acme")
def test_in_memory_and_from_disk_the_same_layers_stay_float(tmp_path: Path) -> None:
    sizes = {"hidden_size": WIDTH, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = AcmeConfig(vocab_size=64, **sizes)  # type: ignore[arg-type]
    torch.manual_seed(0)
    model = AcmeForCausalLM(config)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=1 / math.sqrt(WIDTH))
    model.save_pretrained(tmp_path / "source")
    settings, on_disk = (template_of(one).get_config(scheme="int4_wo_32") for one in (model, meta_model(tmp_path / "source")))
    quantized = ModelQuantizer(settings).quantize_model(load_model(tmp_path / "source"))
    export_with("safetensors", quantized, tmp_path / "memory")
    quantize_checkpoint(tmp_path / "source", tmp_path / "disk", on_disk)
    assert contents(tmp_path / "memory") == contents(tmp_path / "disk")
    rows = {row.name.partition("layers.0.")[2] for row in quantized.quark_plan.quantized}
    assert rows >= {"mlp.shared", "mlp.part0", "self_attn.q_proj"}
    assert "mlp.foo" not in rows
