"""No reader gives other values where the strictest refuses a checkpoint that somebody has altered.

The strictest is ``quark inspect``, which compares every stored tensor with what the ``quantization_config``
announces. What the headers of files cannot show is not asked here: codes of another format with the same
dtype and shape, another order of packing, and how inputs are rounded at run time.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from quark.checkpoint import import_model_from_safetensors, register_layouts
from quark.checkpoint.inspection import inspect_checkpoint
from quark.checkpoint.transformers_loading import load_checkpoint
from quark.config.layer import QLayerConfig
from quark.config.model import QConfig
from quark.errors import CheckpointError, EnvironmentConflictError, PluginError, QuarkError, UnsupportedError
from quark.models.plan.family import architecture_of
from quark.models.plan.quant_plan import make_plan
from quark.runs import quantize_checkpoint
from quark.runs.from_disk import opened_checkpoint
from quark.torch import LLMTemplate
from quark_workbench.evaluate.quantized_checkpoint import QuantizedCheckpoint

pytestmark = pytest.mark.thorough

IDS = torch.arange(3, 20)[None]
SIZES: dict[str, Any] = {"vocab_size": 32, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1}
HEADS: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": False}

CASES = [
    ("safetensors", "int4_wo_32"),
    ("safetensors", "uint4_wo_32"),
    ("safetensors", "int8"),
    ("safetensors", "fp8"),
    ("safetensors", "fp8 and its cache"),
    ("safetensors", "mxfp4"),
    ("safetensors", "nvfp4"),
    ("safetensors", "mx6"),
    ("awq", "int4_wo_32"),
    ("awq", "uint4_wo_32"),
    ("fp8", "fp8"),
    ("fp8", "blocks"),
    ("compressed_tensors", "int4_wo_32"),
    ("compressed_tensors", "uint4_wo_32"),
    ("compressed_tensors", "int8"),
    ("compressed_tensors", "fp8"),
    ("compressed_tensors", "mxfp4"),
    ("compressed_tensors", "nvfp4"),
]
"""Layouts and schemes."""

PARTS = 30
"""Into so many the alterations of a case are divided; one is in the suite."""


@torch.no_grad()
def logits(model: nn.Module) -> Tensor:
    result: Any = model(IDS)
    return result.logits.float()


def imported(directory: Path) -> Tensor:
    return logits(import_model_from_safetensors(None, directory))


def packed(directory: Path) -> Tensor:
    return logits(import_model_from_safetensors(None, directory, packed=True))


def evaluated(directory: Path) -> Tensor:
    return logits(load_checkpoint(directory))


def by_transformers(directory: Path) -> Tensor:
    if block_of(directory).get("quant_method") != "quark":
        raise UnsupportedError("transformers reads it by itself")
    return logits(AutoModelForCausalLM.from_pretrained(directory, dtype="auto"))


def by_block(directory: Path) -> Tensor:
    checkpoint = QuantizedCheckpoint(directory, torch.device("cpu"))
    for block in (None, *checkpoint.blocks):
        checkpoint.load(block)
    return logits(checkpoint.model)


def dequantized(directory: Path) -> Tensor:
    """The logits of the float model that ``quantize`` makes of a quantized source."""
    _, source = opened_checkpoint(directory)
    source.prepare(make_plan(source.model, QConfig(global_quant_config=QLayerConfig()), architecture_of(source.model)))
    source.load_all()
    return logits(source.model)


READERS: dict[str, Callable[[Path], Tensor]] = {
    reader.__name__: reader for reader in (imported, packed, evaluated, by_transformers, by_block, dequantized)
}


def is_whole(directory: Path) -> bool:
    try:
        return not inspect_checkpoint(directory).damage
    except QuarkError:
        return False


def block_of(directory: Path) -> dict[str, Any]:
    block: dict[str, Any] = json.loads((directory / "config.json").read_text())["quantization_config"]
    return block


def altered(export: Path, out: Path, block: object) -> Path:
    """The export with another ``quantization_config``; its other files are links."""
    out.mkdir()
    for file in export.iterdir():
        os.link(file, out / file.name)
    config = json.loads((export / "config.json").read_text())
    (out / "config.json").unlink()
    (out / "config.json").write_text(json.dumps(config | {"quantization_config": block}))
    return out


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    directory = tmp_path_factory.mktemp("altered") / "float"
    LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS)).to(torch.bfloat16).save_pretrained(directory)
    return directory


def export(source: Path, layout: str, scheme: str) -> Path:
    """The source in that layout and scheme, made once."""
    register_layouts()
    out = source.parent / f"{layout} {scheme}"
    if not out.exists():
        cache = {"kv_cache_scheme": "fp8"} if scheme.endswith("cache") else {}
        config = LLMTemplate.get("llama").get_config(scheme=scheme.split()[0].replace("blocks", "fp8"), **cache)
        if scheme == "blocks":
            weight = {"dtype": "fp8_e4m3", "qscheme": "per_block", "block_size": [64, 64], "symmetric": True, "is_dynamic": False}
            inputs = {"dtype": "fp8_e4m3", "qscheme": "per_group", "ch_axis": -1, "group_size": 64, "symmetric": True, "is_dynamic": True}
            layer = QLayerConfig.from_dict({"weight": weight, "input_tensors": inputs | {"observer_cls": "PerGroupMinMaxObserver"}})
            config = QConfig(global_quant_config=layer, exclude=["lm_head"])
        quantize_checkpoint(source, out, config, [IDS], exporter=layout)
    return out


VALUES: dict[str, tuple[object, ...]] = {
    "dtype": ("int4", "uint4", "int8", "fp4", "fp8_e4m3", "fp8_e5m2", "mx6"),
    "scale_format": ("float32", "e8m0", None),
    "qscheme": ("per_tensor", "per_channel", "per_group", "per_block"),
    "quant_method": ("quark", "awq", "fp8", "compressed-tensors", "mxfp4", "fbgemm_fp8", 4294967296),
    "strategy": ("tensor", "channel", "group", "block", "tensor_group", "token"),
    "format": ("pack-quantized", "int-quantized", "float-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized"),
    "type": ("int", "float"),
    "weight_format": ("real_quantized", "fake_quantized"),
    "activation_scheme": ("static", "dynamic"),
    "weight_block_size": ([32, 32], [64, 128], [64, 32]),
}
"""Other values by key, beside those that `_others` makes of a value's type."""


def _others(value: object) -> list[object]:
    if isinstance(value, bool):
        return [not value, None]
    if isinstance(value, int):
        return [value * 2, value // 2, 0, -1, str(value), 2**32]
    if isinstance(value, str):
        return ["", None, 7]
    if isinstance(value, list):
        return [[], value[:1], value + value[-1:], None]
    return [{}, None, []] if isinstance(value, dict) else [0, True, {}, "x"]


def alterations(block: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every value of a ``quantization_config`` gone, and replaced by others, each with its description."""
    for at in _places(block):
        for other in (..., *VALUES.get(str(at[-1]), ()), *_others(_value(block, at))):
            changed = copy.deepcopy(block)
            owner = _value(changed, at[:-1])
            if other is ...:
                del owner[at[-1]]
            else:
                owner[at[-1]] = other
            yield f"{'.'.join(map(str, at))} = {'gone' if other is ... else other}", changed


def _places(value: object, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        if key != "quark_plugins":
            yield (*at, key)
            yield from _places(inner, (*at, key))


def _value(block: Any, at: tuple[Any, ...]) -> Any:
    for key in at:
        block = block[key]
    return block


def outcome(reader: Callable[[Path], Tensor], directory: Path, expected: Tensor | None) -> str | None:
    """What is wrong with the way in which a reader ends, for a checkpoint that the strictest refuses."""
    try:
        values = reader(directory)
    except PluginError as error:
        return f"ends in a PluginError: {error}"
    except QuarkError:
        return None
    return None if expected is not None and torch.equal(values, expected) else "gives values, and others than before"


@pytest.mark.one_in(PARTS)
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize(("layout", "scheme"), CASES)
def test_no_reader_gives_other_values_where_the_strictest_refuses(
    layout: str, scheme: str, part: int, source: Path, tmp_path: Path
) -> None:
    directory = export(source, layout, scheme)
    assert is_whole(directory)
    expected: dict[str, Tensor | None] = {}
    for name, reader in READERS.items():
        try:
            expected[name] = reader(directory)
        except (EnvironmentConflictError, UnsupportedError, CheckpointError):
            # transformers alone: it needs a library, cannot read the layout, or passes over its scales.
            assert name in ("evaluated", "by_transformers")
            expected[name] = None
    wrong = []
    for number, (what, block) in list(enumerate(alterations(block_of(directory))))[part::PARTS]:
        copied = altered(directory, tmp_path / str(number), block)
        if not is_whole(copied):
            wrong += [f"{what}: {name} {w}" for name, reader in READERS.items() if (w := outcome(reader, copied, expected[name]))]
        shutil.rmtree(copied)
    assert not wrong


@pytest.mark.parametrize("algorithm", [{"name": "rotation"}, {"name": "rotation", "r1": "x"}, {"name": "gptq", "x": 1}, {"name": 7}, {}, 1])
def test_settings_of_an_algorithm_in_another_form_are_refused_or_not_needed(algorithm: object, source: Path, tmp_path: Path) -> None:
    directory = export(source, "safetensors", "int4_wo_32")
    copied = altered(directory, tmp_path / "out", block_of(directory) | {"algo_config": [algorithm]})
    expected = {name: reader(directory) for name, reader in READERS.items()}
    assert not [f"{name} {w}" for name, reader in READERS.items() if (w := outcome(reader, copied, expected[name]))]


def altered_tensors(stored: dict[str, Tensor], layer: str) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Every tensor of a layer gone, of another dtype and of another shape; and others beside it."""
    number = torch.ones(1)
    for leaf in ("weight_scale", "weight_scale_2", "weight_scale_inv", "weight_global_scale", "input_scale", "weight"):
        if f"{layer}.{leaf}" not in stored:
            yield f"{leaf} beside it", stored | {f"{layer}.{leaf}": number}
    for name, tensor in stored.items():
        if name.startswith(f"{layer}."):
            yield f"{name} gone", {other: t for other, t in stored.items() if other != name}
            yield f"{name} as codes", stored | {name: tensor.reshape(-1).view(torch.uint8).reshape(*tensor.shape, -1).squeeze(-1)}
            yield f"{name} as numbers", stored | {name: tensor.to(torch.float32)} if tensor.dtype not in FLOATS else stored
            yield f"{name} cut", stored | {name: tensor[: len(tensor) // 2].contiguous() if tensor.ndim else tensor.expand(2).contiguous()}


FLOATS = (torch.float16, torch.bfloat16, torch.float32)


@pytest.mark.parametrize(("layout", "scheme"), CASES)
def test_no_reader_gives_other_values_of_altered_tensors(layout: str, scheme: str, source: Path, tmp_path: Path) -> None:
    directory = export(source, layout, scheme)
    wrong = []
    stored = load_file(directory / "model.safetensors")
    for number, (what, tensors) in enumerate(altered_tensors(stored, "model.layers.0.mlp.up_proj")):
        copied = altered(directory, tmp_path / str(number), block_of(directory))
        (copied / "model.safetensors").unlink()
        save_file(tensors, copied / "model.safetensors", {"format": "pt"})
        if not is_whole(copied):
            wrong += [f"{what}: {name} {w}" for name, reader in READERS.items() if (w := outcome(reader, copied, None))]
    assert not wrong
