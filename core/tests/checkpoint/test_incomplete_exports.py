"""An export without all tensors that its reader needs is refused before it is renamed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, Qwen2Config

from quark.checkpoint import export_safetensors, import_model_from_safetensors
from quark.checkpoint.model_tensors import Part
from quark.errors import PluginError
from quark.models.hf.loading import load_model
from quark.plugins import Source, exporters
from quark.runs import ModelQuantizer, quantize_checkpoint
from quark.torch import LLMTemplate

SAFETENSORS: Any = exporters().load_exporter("safetensors")
RECORD = exporters().get("safetensors")
DATA = [torch.arange(3, 40)[None], torch.arange(20, 50)[None]]


class Forgets(SAFETENSORS):
    """Omits some tensors, and announces only the tensors that it writes."""

    suffix = ""

    def parts(self, *args: Any) -> list[Part]:
        return [attrs.evolve(part, meta=self._kept(part.meta), make=self._making(part)) for part in super().parts(*args)]

    def _making(self, part: Part) -> Callable[[], Any]:
        return lambda: self._kept(part.make())

    def _kept(self, tensors: Any) -> dict[str, Any]:
        return {name: tensor for name, tensor in tensors.items() if not self.suffix or not name.endswith(self.suffix)}


class ForgetsBiases(Forgets):
    suffix = "v_proj.bias"


class ForgetsScales(Forgets):
    suffix = "up_proj.weight_scale"


class ForgetsInputScales(Forgets):
    suffix = "down_proj.input_scale"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(Qwen2Config(**sizes, num_key_value_heads=2), dtype=torch.bfloat16)
    model.save_pretrained(out := tmp_path_factory.mktemp("source"))
    return out


@pytest.fixture
def registered(request: pytest.FixtureRequest) -> Iterator[None]:
    own: dict[str, Any] = {"name": "forgetful", "aliases": (), "quant_methods": ("forgetful",), "exporter": f"{__name__}:{request.param}"}
    record = attrs.evolve(RECORD, **own)
    exporters().register(record, Source("broken-quant", "0.3"))
    yield
    exporters().unregister("forgetful")


def quantized(source: Path, scheme: str) -> nn.Module:
    return ModelQuantizer(LLMTemplate.get("qwen2").get_config(scheme=scheme)).quantize_model(load_model(source), DATA)


def in_memory(source: Path, out: Path, scheme: str) -> None:
    export_safetensors(quantized(source, scheme), out, custom_mode="forgetful")


def from_disk(source: Path, out: Path, scheme: str) -> None:
    config = LLMTemplate.get("qwen2").get_config(scheme=scheme)
    quantize_checkpoint(source, out, config, DATA, exporter="forgetful", restart=True)


WAYS = pytest.mark.parametrize("write", [in_memory, from_disk])


@WAYS
@pytest.mark.parametrize(
    ("registered", "scheme", "missing"),
    [
        ("ForgetsBiases", "int4_wo_32", r"2 tensor\(s\) .* model\.layers\.\{0-1\}\.self_attn\.v_proj\.bias"),
        ("ForgetsScales", "int4_wo_32", r"2 tensor\(s\) .* model\.layers\.\{0-1\}\.mlp\.up_proj\.weight.*scale"),
        ("ForgetsInputScales", "fp8", r"2 tensor\(s\) .* model\.layers\.\{0-1\}\.mlp\.down_proj\.input.*scale"),
    ],
    indirect=["registered"],
)
def test_what_it_lacks_is_named_and_nothing_is_left(
    registered: None, write: Callable[[Path, Path, str], None], scheme: str, missing: str, source: Path, tmp_path: Path
) -> None:
    with pytest.raises(PluginError, match=rf"the exporter 'forgetful' of broken-quant 0\.3 has written files that lack {missing}"):
        write(source, tmp_path / "out", scheme)
    assert not (tmp_path / "out").exists()


@WAYS
@pytest.mark.parametrize("registered", ["Forgets"], indirect=True)
def test_one_that_lacks_nothing_is_written(
    registered: None, write: Callable[[Path, Path, str], None], source: Path, tmp_path: Path
) -> None:
    write(source, tmp_path / "out", "fp8")
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_a_model_that_is_not_what_its_config_says_is_not_checked(source: Path, tmp_path: Path) -> None:
    model = quantized(source, "int4_wo_32")
    model.model.layers = model.model.layers[:1]  # type: ignore[union-attr,index]
    export_safetensors(model, tmp_path / "out")
    shorter: Any = load_model(source)
    shorter.model.layers = shorter.model.layers[:1]
    again = import_model_from_safetensors(shorter, tmp_path / "out", device="cpu")
    with torch.no_grad():
        assert torch.equal(again(DATA[0]).logits, model(DATA[0]).logits)
