"""Tensors of a checkpoint that its model class does not take: every export has them as they are stored."""

from __future__ import annotations

import json
import logging
import shutil
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from quark.base.ranks import Ranks
from quark.checkpoint import ExportOptions
from quark.checkpoint.export import export_with
from quark.checkpoint.inspection import inspect_checkpoint
from quark.config.model import QConfig
from quark.models.hf.loading import load_model
from quark.runs import ModelQuantizer, from_disk, quantize_checkpoint
from quark.torch import LLMTemplate, import_model_from_safetensors
from quark_devkit.threads import in_threads
from quark_devkit.whole_runs import contents, interrupted_behind
from quark_workbench.planning.planned_run import plan, planned_lines

from .interrupted import DATA, checkpoint

pytestmark = pytest.mark.thorough

AHEAD = {
    "{0}.fc.weight": (32, 64),
    "{0}.norm.weight": (64,),
    "{0}.self_attn.q_proj.weight": (64, 64),
    "{0}.mlp.experts.gate_up_proj": (4, 64, 64),
    "{0}.mlp.experts.3.down_proj.weight": (64, 32),
    "{0}.shared_head.head.weight": (64, 64),
}
"""Shapes of the tensors of a layer that predicts ahead, by name."""
MIXTURE: dict[str, Any] = {"moe_intermediate_size": 64, "num_experts_per_tok": 2}
FAMILIES: dict[str, tuple[dict[str, Any], str]] = {
    "llama": ({}, "mtp.layers.0"),
    "qwen3_next": (
        MIXTURE
        | {
            "num_experts": 4,
            "shared_expert_intermediate_size": 64,
            "layer_types": ["linear_attention", "linear_attention", "full_attention"],
        },
        "mtp.layers.0",
    ),
    "deepseek_v3": (
        MIXTURE
        | {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "q_lora_rank": 32, "kv_lora_rank": 32, "first_k_dense_replace": 1}
        | {"qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16, "num_key_value_heads": 4},
        "model.layers.3",
    ),
}
"""Choices of a configuration, and the name of the layer that predicts ahead, by model type."""
OTHERS: dict[str, Tensor] = {
    "bare": torch.tensor([1.5, float("inf")]),
    "model.layers.0.gate_of_another_program": torch.tensor([3, 4], dtype=torch.int64),
    "vision_tower.patch.weight": torch.ones(2, 3, 4, dtype=torch.float64),
    "empty.weight": torch.ones(0, 4, dtype=torch.bfloat16),
}
"""Other tensors that no class takes."""


def source_of(directory: Path, family: str) -> tuple[Path, dict[str, Tensor]]:
    """A checkpoint with tensors that its class does not take, and these."""
    sizes, prefix = FAMILIES[family]
    checkpoint(directory, family, **sizes)
    generator = torch.Generator().manual_seed(1)
    more = {name.format(prefix): torch.randn(shape, generator=generator).to(torch.bfloat16) for name, shape in AHEAD.items()} | OTHERS
    save_file(load_file(directory / "model.safetensors") | more, directory / "model.safetensors", {"format": "pt"})
    return directory, more


def config(family: str, scheme: str = "int4_wo_32") -> QConfig:
    return LLMTemplate.get(family).get_config(scheme=scheme)


def stored(export: Path) -> dict[str, Tensor]:
    return {name: tensor for path in export.glob("*.safetensors") for name, tensor in load_file(path).items()}


def check(export: Path, more: Mapping[str, Tensor], excluded_under: str = "exclude") -> None:
    """Check that an export has these tensors to the bit, and lists each of them as excluded."""
    tensors = stored(export)
    for name, expected in more.items():
        assert (tensors[name].dtype, tensors[name].shape) == (expected.dtype, expected.shape)
        assert tensors[name].flatten().view(torch.uint8).equal(expected.flatten().view(torch.uint8)), name
    listed = json.loads((export / "config.json").read_text())["quantization_config"][excluded_under]
    assert not [name for name in more if name not in listed and name.rpartition(".")[0] not in listed]
    assert "model.layers.0" not in listed
    assert "" not in listed


@pytest.mark.parametrize("shard_bytes", [5_000_000_000, 20_000])
@pytest.mark.parametrize("family", FAMILIES)
def test_they_are_carried_over_from_memory_and_from_disk(family: str, shard_bytes: int, tmp_path: Path) -> None:
    source, more = source_of(tmp_path / "source", family)
    options = ExportOptions(max_shard_bytes=shard_bytes)
    quantize_checkpoint(source, tmp_path / "disk", config(family), options=options)
    check(tmp_path / "disk", more)
    export_with("safetensors", ModelQuantizer(config(family)).quantize_model(load_model(source)), tmp_path / "memory", options)
    assert contents(tmp_path / "memory") == contents(tmp_path / "disk")


@pytest.mark.parametrize(
    ("exporter", "scheme", "listed_under"),
    [
        ("safetensors", "ptpc_fp8", "exclude"),
        ("compressed-tensors", "int8", "ignore"),
        ("fp8", "fp8", "modules_to_not_convert"),
        ("awq", "uint4_wo_32", "modules_to_not_convert"),
    ],
)
def test_every_reader_takes_such_an_export_and_writes_it_again(exporter: str, scheme: str, listed_under: str, tmp_path: Path) -> None:
    source, more = source_of(tmp_path / "source", "llama")
    export_with(exporter, ModelQuantizer(config("llama", scheme)).quantize_model(load_model(source), DATA), tmp_path / "once")
    check(tmp_path / "once", more, listed_under)
    assert not inspect_checkpoint(tmp_path / "once").damage
    once = import_model_from_safetensors(None, tmp_path / "once", device="cpu")
    export_with(exporter, once, tmp_path / "twice")
    check(tmp_path / "twice", more, listed_under)
    twice = import_model_from_safetensors(None, tmp_path / "twice", device="cpu")
    with torch.no_grad():
        assert torch.equal(twice(DATA[0]).logits, once(DATA[0]).logits)


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_loads_an_export_with_a_layer_that_predicts_ahead(family: str, tmp_path: Path) -> None:
    source, _ = source_of(tmp_path / "source", family)
    model = ModelQuantizer(config(family)).quantize_model(load_model(source))
    export_with("safetensors", model, tmp_path / "out")
    with torch.no_grad():
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
        assert torch.equal(loaded(DATA[0]).logits, model(DATA[0]).logits)


def test_a_run_that_goes_on_and_one_of_several_ranks_carry_them_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, more = source_of(tmp_path / "source", "llama")
    quantize_checkpoint(source, tmp_path / "once", config("llama"))
    check(tmp_path / "once", more)
    with interrupted_behind(2):
        quantize_checkpoint(source, tmp_path / "resumed", config("llama"))
    quantize_checkpoint(source, tmp_path / "resumed", config("llama"), resume=True)
    assert contents(tmp_path / "resumed") == contents(tmp_path / "once")

    plain, lock = from_disk.opened_checkpoint, threading.Lock()

    def opened(*args: Any, **kwargs: Any) -> Any:  # one at a time, since transformers sets torch's default dtype meanwhile
        with lock:
            return plain(*args, **kwargs)

    monkeypatch.setattr(from_disk, "opened_checkpoint", opened)

    def shared(ranks: Ranks) -> None:
        quantize_checkpoint(source, tmp_path / "shared", config("llama"), ranks=ranks)

    in_threads(shared, 2, is_deterministic=True)
    assert contents(tmp_path / "shared") == contents(tmp_path / "once")


def test_the_plan_and_the_log_name_them(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source, more = source_of(tmp_path / "source", "qwen3_next")
    planned = plan(source, config("qwen3_next"), probing=False)
    assert planned.plan is not None
    assert set(planned.plan.carried) == set(planned.plan.to_dict()["carried"]) == set(more)
    assert f"{len(more)} tensor(s) of the checkpoint that a Qwen3NextForCausalLM does not use are copied unchanged" in "\n".join(
        planned_lines(planned)
    )
    assert planned.estimate is not None
    assert planned.estimate.output is not None
    with caplog.at_level(logging.INFO):
        quantize_checkpoint(source, tmp_path / "out", config("qwen3_next"))
    assert f"holds {len(more)} tensor(s) that a Qwen3NextForCausalLM has no place for" in caplog.text
    size = sum(path.stat().st_size for path in (tmp_path / "out").glob("*.safetensors"))
    assert planned.estimate.output.bytes == size


def test_what_somebody_took_out_of_a_model_in_memory_is_not_carried_over(tmp_path: Path) -> None:
    source, more = source_of(tmp_path / "source", "llama")
    model: Any = load_model(source)
    del model.model.layers[2]
    model.config.num_hidden_layers = 2
    export_with("safetensors", ModelQuantizer(config("llama")).quantize_model(model), tmp_path / "out")
    check(tmp_path / "out", more)
    assert not [name for name in stored(tmp_path / "out") if name.startswith("model.layers.2.")]


@pytest.mark.parametrize(("exporter", "scheme"), [("gguf", "int4_wo_32"), ("onnx", "int8")])
def test_an_export_that_has_no_place_for_them_names_them(
    exporter: str, scheme: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip(exporter)
    source, more = source_of(tmp_path / "source", "llama")
    model = ModelQuantizer(config("llama", scheme)).quantize_model(load_model(source, "float32"), DATA)
    export_with(exporter, model, tmp_path / "out", ExportOptions(input_args=(DATA[0],)))
    (warning,) = [record.message for record in caplog.records if "holds only the tensors" in record.message]
    assert f"It lacks {len(more)} other tensor(s) of the float" in warning
    assert "mtp.layers.0.fc.weight" in warning
    assert f"A {exporter.upper()} file holds only the tensors of a LlamaForCausalLM" in warning


def in_the_cache(source: Path, hub: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a checkpoint into a cache of the hub, as a download does; return its directory there."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(hub))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    folder = hub / f"models--{name.replace('/', '--')}"
    version = "0123456789abcdef0123456789abcdef01234567"
    for part in ("refs", "blobs", f"snapshots/{version}"):
        (folder / part).mkdir(parents=True)
    (folder / "refs" / "main").write_text(version)
    for file in source.iterdir():
        shutil.move(file, folder / "blobs" / file.name)
        (folder / "snapshots" / version / file.name).symlink_to(f"../../blobs/{file.name}")
    return folder / "snapshots" / version


@pytest.mark.posix("a cache of the hub has links, for which Windows wants a privilege")
def test_a_model_by_its_name_on_a_hub_has_what_its_directory_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    source, more = source_of(tmp_path / "source", "qwen3_next")
    (source / "LICENSE").write_text("free")
    (source / "tekken.json").write_text("{}")
    kept = shutil.copytree(source, tmp_path / "kept")
    snapshot = in_the_cache(source, tmp_path / "hub", "somebody/Model", monkeypatch)
    model = AutoModelForCausalLM.from_pretrained("somebody/Model").eval()
    with caplog.at_level(logging.INFO):
        export_with("safetensors", ModelQuantizer(config("qwen3_next")).quantize_model(model), tmp_path / "out")
    check(tmp_path / "out", more)
    assert (tmp_path / "out" / "LICENSE").read_text() == "free"
    assert f"Copied these files of 'somebody/Model' from the hub cache ('{snapshot}')" in caplog.text
    assert "LICENSE, tekken.json" in caplog.text
    export_with("safetensors", ModelQuantizer(config("qwen3_next")).quantize_model(load_model(kept)), tmp_path / "expected")
    assert contents(tmp_path / "out") == contents(tmp_path / "expected")


@pytest.mark.posix("a cache of the hub has links, for which Windows wants a privilege")
@pytest.mark.parametrize("versions", [0, 2])
def test_a_model_whose_version_is_not_known_is_exported_with_a_warning(
    versions: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    source, more = source_of(tmp_path / "source", "llama")
    snapshot = in_the_cache(source, tmp_path / "hub", "somebody/Model", monkeypatch)
    model = AutoModelForCausalLM.from_pretrained("somebody/Model").eval()
    if versions:
        other = shutil.copytree(snapshot, snapshot.with_name("of-other-weights"), symlinks=True)
        (other / "model.safetensors").unlink()
        shutil.copy(snapshot / "model.safetensors", other / "model.safetensors")
        monkeypatch.delattr(model.config, "_commit_hash", raising=False)
    else:
        shutil.rmtree(tmp_path / "hub")
    export_with("safetensors", ModelQuantizer(config("llama")).quantize_model(model), tmp_path / "out")
    assert "was loaded from 'somebody/Model', which is no directory" in caplog.text
    assert "the hub cache (HF_HOME) has no version or several versions of it" in caplog.text
    assert not stored(tmp_path / "out").keys() & more.keys()
    assert import_model_from_safetensors(None, tmp_path / "out", device="cpu") is not None


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("llama", "model.layers.0.self_attn.rotary_emb.inv_freq"),
        ("llama", "model.rotary_emb.inv_freq"),
        ("gpt2", "transformer.h.0.attn.bias"),
        ("gpt2", "h.1.attn.bias"),
    ],
)
def test_what_a_class_computes_is_not_carried_over(family: str, name: str, tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "source", family)
    save_file(load_file(source / "model.safetensors") | {name: torch.ones(8)}, source / "model.safetensors", {"format": "pt"})
    quantize_checkpoint(source, tmp_path / "out", config(family))
    assert name not in stored(tmp_path / "out")


def test_codes_that_no_class_takes_are_written_as_the_values_that_they_stand_for(tmp_path: Path) -> None:
    source, _ = source_of(tmp_path / "source", "llama")
    export_with("fp8", ModelQuantizer(config("llama", "fp8")).quantize_model(load_model(source), DATA), tmp_path / "fp8")
    tensors = stored(tmp_path / "fp8")
    ahead = {
        f"mtp.layers.1.{leaf}": tensors[f"model.layers.1.mlp.up_proj.{leaf}"].clone() for leaf in ("weight", "weight_scale", "input_scale")
    }
    save_file(tensors | ahead, tmp_path / "fp8" / "model.safetensors", {"format": "pt"})
    expected = ahead["mtp.layers.1.weight"].float() * ahead["mtp.layers.1.weight_scale"].float()
    quantize_checkpoint(tmp_path / "fp8", tmp_path / "out", attrs.evolve(config("llama"), keep_prequantized_layers=False))
    written = stored(tmp_path / "out")
    assert torch.equal(written["mtp.layers.1.weight"], expected.to(torch.bfloat16))
    assert not {"mtp.layers.1.weight_scale", "mtp.layers.1.input_scale"} & written.keys()
