"""From a checkpoint to a checkpoint: the bytes of a run in memory, with one block in memory at a time.

A run that fails leaves nothing behind.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from quark.algorithms import Hessian, RoundToNearest
from quark.checkpoint import CheckpointContent, Exporter, ExportOptions
from quark.checkpoint.export import export_with
from quark.checkpoint.shard_writer import ShardWriter
from quark.config.model import QConfig
from quark.errors import CalibrationError, CheckpointError, ConfigError, NonFiniteError, OutputError, UnsupportedError
from quark.models.hf.loading import load_model
from quark.plugins import ExporterRecord, exporters
from quark.runs import ModelQuantizer, quantize_checkpoint
from quark.runs.selected_algorithms import Algorithms
from quark.torch import LLMTemplate
from quark_devkit.whole_runs import contents
from quark_tiny_model import tiny_model_dir

DATA = [torch.arange(3, 40)[None], torch.arange(20, 50)[None]]
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "head_dim": 16,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
}


class Calibrated(RoundToNearest):
    """Rounds to nearest, but asks for statistics, so that layers are rounded amid the forwards."""

    needs = (Hessian,)


def config(family: str, **choices: Any) -> QConfig:
    return LLMTemplate.get(family).get_config(**choices)


def checkpoint(directory: Path, family: str, **more: Any) -> Path:
    """A tiny random checkpoint of a family of transformers."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SIZES | more), dtype=torch.bfloat16)
    model.save_pretrained(directory)
    return directory


def both_ways(source: Path, tmp_path: Path, asked: QConfig, options: ExportOptions | None = None) -> tuple[Path, Path]:
    """The result from disk, and that of loading, quantizing and exporting."""
    quantize_checkpoint(source, tmp_path / "disk", asked, DATA, options=options)
    model = ModelQuantizer(asked).quantize_model(load_model(source), DATA)
    export_with("safetensors", model, tmp_path / "memory", options)
    return tmp_path / "disk", tmp_path / "memory"


CHOICES: dict[str, dict[str, Any]] = {
    "int4": {"scheme": "int4_wo_64"},
    "uint4": {"scheme": "uint4_wo_64"},
    "static fp8 with an fp8 cache": {"scheme": "fp8", "kv_cache_scheme": "fp8"},
    "fp8 attention after the rotary embedding": {
        "scheme": "fp8",
        "kv_cache_scheme": "fp8",
        "attention_scheme": "fp8",
        "kv_cache_post_rope": True,
    },
    "a cache with scales of heads": {"scheme": "fp8", "kv_cache_scheme": "fp8_per_head"},
    "an nvfp4 cache": {"scheme": "int4_wo_64", "kv_cache_scheme": "nvfp4"},
    "mxfp4": {"scheme": "mxfp4"},
    "nvfp4 with one outer scale for fused layers": {
        "scheme": "nvfp4",
        "shared_scale_groups": [["q_proj", "k_proj", "v_proj"], ["gate_proj", "up_proj"]],
    },
    "the output head too": {"scheme": "int4_wo_64", "exclude_layers": []},
    "another scheme for some layers": {"scheme": "mxfp4", "layer_config": {"*down_proj": "fp8"}},
}


@pytest.mark.parametrize("choice", CHOICES)
def test_the_bytes_are_those_of_the_export_from_memory(choice: str, tmp_path: Path) -> None:
    disk, memory = both_ways(tiny_model_dir(), tmp_path, config("llama", **CHOICES[choice]))
    assert contents(disk) == contents(memory)


@pytest.mark.parametrize("scheme", ["int4_wo_64", "fp8"])
def test_so_they_are_when_layers_are_rounded_in_lock_step(scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quark.runs.run.algorithms_of", lambda _: Algorithms(rounding=Calibrated()))
    disk, memory = both_ways(tiny_model_dir(), tmp_path, config("llama", scheme=scheme))
    assert contents(disk) == contents(memory)


def test_so_they_are_with_gptq(tmp_path: Path) -> None:
    disk, memory = both_ways(tiny_model_dir(), tmp_path, config("llama", scheme="int4_wo_64", algorithm="gptq"))
    assert contents(disk) == contents(memory)


@pytest.mark.parametrize("streams", [True, False], ids=["block by block", "as a whole"])
def test_the_plan_that_is_returned_is_of_what_was_done_and_names_no_algorithm_that_was_left_out(
    streams: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quark_exporters.quark_layout.layout.SafetensorsExporter.streams", streams)
    monkeypatch.setattr("quark_algos.rotation.transform.Rotate.accepts", lambda *_: False)
    asked = config("llama", scheme="nvfp4", algorithm="rotation")
    model = ModelQuantizer(asked).quantize_model(load_model(tiny_model_dir()), DATA)
    plan = quantize_checkpoint(tiny_model_dir(), tmp_path / "out", asked, DATA)
    assert asked.algo_config
    assert plan.config.algo_config is None
    assert [note for note in plan.notes if "no gain" in note and "rotation" in note]
    assert plan.to_dict() == model.quark_plan.to_dict()


@pytest.mark.parametrize("options", [ExportOptions(max_shard_bytes=200_000), ExportOptions(weight_format="fake_quantized")])
def test_so_they_are_in_shards_and_as_rounded_values(options: ExportOptions, tmp_path: Path) -> None:
    disk, memory = both_ways(tiny_model_dir(), tmp_path, config("llama", scheme="int4_wo_64"), options)
    assert contents(disk) == contents(memory)


FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "tied embeddings": ("llama", {"tie_word_embeddings": True}),
    "experts fused when they are read": ("mixtral", {"num_local_experts": 4}),
    "experts and a router": ("qwen3_moe", {"num_experts": 4, "moe_intermediate_size": 32, "num_experts_per_tok": 2}),
    "experts that are stored fused": ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "tensors kept in float32": (
        "deepseek_v3",
        {
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "moe_intermediate_size": 32,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "num_experts_per_tok": 2,
            "q_lora_rank": 32,
            "kv_lora_rank": 32,
            "qk_rope_head_dim": 16,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
        },
    ),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("case", FAMILIES)
@pytest.mark.parametrize("scheme", ["int4_wo_32", "fp8"])
def test_so_they_are_for_other_families(case: str, scheme: str, tmp_path: Path) -> None:
    family, more = FAMILIES[case]
    disk, memory = both_ways(checkpoint(tmp_path / "source", family, **more), tmp_path, config(family, scheme=scheme))
    assert contents(disk) == contents(memory)


def test_tied_tensors_that_differ_in_the_checkpoint_are_both_kept(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "source", "llama", tie_word_embeddings=True)
    tensors = load_file(source / "model.safetensors")
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1}, source / "model.safetensors", {"format": "pt"})
    disk, memory = both_ways(source, tmp_path, config("llama", scheme="int4_wo_32"))
    assert contents(disk) == contents(memory)
    assert "lm_head.weight" in load_file(disk / "model.safetensors")


def test_another_dtype_is_that_of_all_float_tensors(tmp_path: Path) -> None:
    quantize_checkpoint(tiny_model_dir(), tmp_path / "out", config("llama", scheme="int4_wo_64"), dtype="float32")
    assert load_file(tmp_path / "out" / "model.safetensors")["model.embed_tokens.weight"].dtype == torch.float32


def test_the_documented_method_writes_the_same(tmp_path: Path) -> None:
    asked = config("llama", scheme="int4_wo_64")
    ModelQuantizer(asked).direct_quantize_checkpoint(str(tiny_model_dir()), str(tmp_path / "documented"), device="cpu")
    quantize_checkpoint(tiny_model_dir(), tmp_path / "own", asked)
    assert contents(tmp_path / "documented") == contents(tmp_path / "own")


@pytest.mark.parametrize("device", ["no-such-device", ["no-such-device", "cpu"]], ids=["one", "the first of several"])
@pytest.mark.parametrize("place", ["old", "new"])
def test_the_documented_method_works_on_the_device_that_it_is_given_in_either_place(
    place: str, device: str | list[str], tmp_path: Path
) -> None:
    given: Any = ((False, device), {}) if place == "old" else ((), {"device": device})
    with pytest.raises(ConfigError, match="no-such-device"):
        ModelQuantizer(config("llama", scheme="int4_wo_64")).direct_quantize_checkpoint(
            tiny_model_dir(), tmp_path / "out", *given[0], **given[1]
        )


def test_the_documented_method_refuses_presharded_weights(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="presharded_weights"):
        ModelQuantizer(config("llama", scheme="int4_wo_64")).direct_quantize_checkpoint("in", "out", presharded_weights={"a": 1})


class WholeModels(Exporter):
    """An exporter of a third party, which knows nothing of blocks."""

    def export(self, content: CheckpointContent, out: Path, options: ExportOptions) -> None:
        meta = [name for name, p in content.model.named_parameters() if p.is_meta]
        (out / "seen.json").write_text(json.dumps({"meta": meta, "quantized": bool(content.plan.quantized)}))


def test_an_exporter_that_cannot_stream_gets_the_whole_model(tmp_path: Path) -> None:
    exporters().register(ExporterRecord(name="other", exporter=f"{__name__}:WholeModels"))
    try:
        quantize_checkpoint(tiny_model_dir(), tmp_path / "out", config("llama", scheme="int4_wo_64"), exporter="other")
    finally:
        exporters().unregister("other")
    assert json.loads((tmp_path / "out" / "seen.json").read_text()) == {"meta": [], "quantized": True}


def damage_shape(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.1.mlp.up_proj.weight"] = torch.zeros(8, 8)


def damage_missing(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["model.layers.2.self_attn.q_proj.weight"]


def damage_value(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.0.mlp.down_proj.weight"][3, 3] = float("nan")


@pytest.mark.parametrize(
    ("damage", "error", "says"),
    [
        (damage_shape, CheckpointError, r"up_proj.*\[8, 8\].*\[384, 256\]"),
        (damage_missing, CheckpointError, "lacks 1 tensor.*layers.2.self_attn.q_proj.weight"),
        (damage_value, NonFiniteError, "layers.0.mlp.down_proj.weight"),
    ],
)
def test_a_bad_checkpoint_is_named_and_nothing_is_left(
    damage: Callable[[dict[str, torch.Tensor]], None], error: type[Exception], says: str, tmp_path: Path
) -> None:
    source = Path(shutil.copytree(tiny_model_dir(), tmp_path / "source"))
    tensors = load_file(source / "model.safetensors")
    damage(tensors)
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(error, match=says):
        quantize_checkpoint(source, tmp_path / "out", config("llama", scheme="int4_wo_64"))
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_missing_experts_are_named(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "source", "mixtral", num_local_experts=4)
    tensors = load_file(source / "model.safetensors")
    gone = next(name for name in tensors if ".experts.2." in name)
    del tensors[gone]
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match="experts"):
        quantize_checkpoint(source, tmp_path / "out", config("mixtral", scheme="int4_wo_32"))


def test_data_that_are_wanted_and_missing_are_asked_for_first(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match="none was given"):
        quantize_checkpoint(tiny_model_dir(), tmp_path / "out", config("llama", scheme="fp8"))
    assert list(tmp_path.iterdir()) == []


def test_an_output_directory_in_use_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("")
    with pytest.raises(OutputError, match="not empty"):
        quantize_checkpoint(tiny_model_dir(), tmp_path, config("llama", scheme="int4_wo_64"))


PEAK = """
import sys, torch
from quark.base.machine import peak_bytes
from quark.runs import quantize_checkpoint
from quark.torch import LLMTemplate
torch.set_num_threads(1)
shallow, deep, out = sys.argv[1:]
peaks = []
for source in (shallow, deep):
    for scheme in ("int4_wo_64", "fp8"):
        config = LLMTemplate.get("llama").get_config(scheme=scheme)
        quantize_checkpoint(source, f"{out}-{len(peaks)}", config, [torch.arange(3, 19)[None]])
        peaks.append(peak_bytes())
print(peaks[-1] - peaks[1])
"""


@pytest.mark.thorough
def test_peak_memory_does_not_grow_with_the_number_of_layers(tmp_path: Path) -> None:
    wide = {"hidden_size": 384, "intermediate_size": 1536, "num_attention_heads": 6, "num_key_value_heads": 6, "head_dim": 64}
    shallow = checkpoint(tmp_path / "shallow", "llama", **wide | {"num_hidden_layers": 3})
    deep = checkpoint(tmp_path / "deep", "llama", **wide | {"num_hidden_layers": 12})
    added = sum((d / "model.safetensors").stat().st_size * sign for d, sign in ((deep, 1), (shallow, -1)))
    command = [sys.executable, "-c", PEAK, str(shallow), str(deep), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    # Nine more layers are 42 MB; a model in memory would add all of them, and one that lets no block go twice
    # as much.
    assert added > 40e6
    assert int(done.stdout.split()[-1]) < added / 2


@pytest.mark.parametrize("head", [False, True], ids=["float head", "quantized head"])
def test_what_stays_float_outside_the_blocks_is_written_first_and_once(head: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[list[str]] = []

    class Recorded(ShardWriter):
        def write(self, part: Mapping[str, Tensor]) -> None:
            written.append(list(part))
            super().write(part)

        def write_beside(self, part: Mapping[str, Tensor]) -> None:
            written.append(list(part))
            super().write_beside(part)

    monkeypatch.setattr("quark.checkpoint.checkpoint_exporter.ShardWriter", Recorded)
    source = checkpoint(tmp_path / "in", "llama", tie_word_embeddings=False)
    quantize_checkpoint(source, tmp_path / "out", config("llama", scheme="int4_wo_32", exclude_layers=[] if head else ["lm_head"]))
    first, names = {"model.embed_tokens.weight", "model.norm.weight"}, [name for part in written for name in part]
    assert set(written[0]) == (first if head else first | {"lm_head.weight"})
    assert len(names) == len(set(names))
    assert set(names) == set(load_file(tmp_path / "out" / "model.safetensors"))
    assert any(name.startswith("lm_head") for name in written[-1]) == head
