"""Every class of models: the command line makes what Python makes, in memory and from disk, and it reads back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils._pytree import tree_leaves

from quark.calibration.batches import ModelInputs
from quark.checkpoint.inspection import inspect_checkpoint
from quark.errors import CheckpointError
from quark.models.plan.decoder_blocks import decoder_blocks
from quark.models.plan.family import architecture_of, template_of
from quark.plugins import algorithms
from quark.runs import quantize_checkpoint
from quark.torch import ModelQuantizer, export_safetensors, import_model_from_safetensors
from quark_workbench.cli.main import program
from quark_workbench.evaluate.outputs import gives_next_tokens
from quark_workbench.evaluate.whole_texts import text_kind
from quark_workbench.planning.planned_run import plan

from .kit.model_classes import MODEL_CLASSES, inputs_of, random_model

SCHEME = "ptpc_fp8"


def outputs_of(model: nn.Module) -> list[torch.Tensor]:
    with torch.no_grad():
        outputs: Any = model(**inputs_of(model))
    return [one for one in tree_leaves(list(outputs.values())) if isinstance(one, torch.Tensor)]


@pytest.mark.parametrize("name", MODEL_CLASSES)
def test_the_command_line_makes_what_python_makes_of_a_class(name: str, tmp_path: Path) -> None:
    model = random_model(name)
    model.save_pretrained(tmp_path / "float")  # type: ignore[operator]
    planned = plan(tmp_path / "float", SCHEME, probing=False)
    assert not planned.refusals
    program()(["quantize", str(tmp_path / "float"), str(tmp_path / "out"), "--scheme", SCHEME], standalone_mode=False)
    assert json.loads((tmp_path / "out/config.json").read_text())["architectures"] == [name]
    assert not inspect_checkpoint(tmp_path / "out").damage

    in_python = type(model).from_pretrained(tmp_path / "float").eval()  # type: ignore[attr-defined]
    in_python = ModelQuantizer(template_of(in_python).get_config(SCHEME)).quantize_model(in_python)
    assert planned.plan is not None
    assert [row.name for row in planned.plan.quantized] == [row.name for row in in_python.quark_plan.quantized]
    assert len(planned.plan.quantized) > 0
    read = import_model_from_safetensors(None, tmp_path / "out", device="cpu")
    assert type(read) is type(model)
    state, expected = read.state_dict(), in_python.state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[key]) for key, tensor in state.items())
    # The same tensors at another alignment in memory are summed in another order.
    torch.testing.assert_close(outputs_of(read), outputs_of(in_python), rtol=1e-5, atol=1e-6)


def facts_of(name: str) -> str:
    """The cells of a class in the page: what calibrates it, and how it is evaluated."""
    model = random_model(name)
    takes = ModelInputs.of(model).takes
    calibrated = "text" if takes is None else f"`{takes[0]}`"
    kind = text_kind(Path(), type(model), model.config, None)
    measured = kind.metric if kind is not None else "perplexity" if gives_next_tokens(model) else "outputs"
    return f"{calibrated} | {measured if takes is None else 'Python'}"


def test_the_page_says_what_works_for_each_class() -> None:
    page = (Path(__file__).parents[1] / "docs/reference/models.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith("| `") and line[3].isupper()]
    classes: dict[str, list[str]] = {}
    for name in sorted(MODEL_CLASSES):
        classes.setdefault(facts_of(name), []).append(f"`{name}`")
    assert rows == [f"| {', '.join(names)} | {facts} |" for facts, names in classes.items()]


@pytest.mark.parametrize("algorithms_", [(), ("gptq",)])
@pytest.mark.parametrize("name", ["MarianMTModel", "BartForConditionalGeneration"])
def test_a_checkpoint_may_lack_what_its_class_computes(name: str, algorithms_: tuple[str, ...], tmp_path: Path) -> None:
    random_model(name).save_pretrained(tmp_path / "float")  # type: ignore[operator]
    file = tmp_path / "float/model.safetensors"
    tensors = {key: tensor for key, tensor in load_file(file).items() if key != "final_logits_bias" and "embed_positions" not in key}
    if name == "BartForConditionalGeneration":  # its positions are learned
        tensors |= {key: tensor for key, tensor in load_file(file).items() if "embed_positions" in key}
    save_file(tensors, file, metadata={"format": "pt"})
    model = type(random_model(name)).from_pretrained(tmp_path / "float").eval()  # type: ignore[attr-defined]
    config = template_of(model).get_config("int4_wo_32")
    config = attrs.evolve(config, algo_config=[algorithms().load_config(algorithm)() for algorithm in algorithms_])
    data = [shifted(inputs_of(model), by) for by in range(4)]
    export_safetensors(ModelQuantizer(config).quantize_model(model, data), tmp_path / "memory")
    quantize_checkpoint(tmp_path / "float", tmp_path / "disk", config, data)
    assert (tmp_path / "memory/model.safetensors").read_bytes() == (tmp_path / "disk/model.safetensors").read_bytes()
    assert outputs_of(import_model_from_safetensors(None, tmp_path / "disk", device="cpu"))


def test_a_checkpoint_may_not_lack_what_its_class_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model("MarianMTModel")
    monkeypatch.setattr(type(model), "_keys_to_ignore_on_load_missing", ["embed_positions", "fc1"])
    model.save_pretrained(tmp_path / "float")  # type: ignore[operator]
    file = tmp_path / "float/model.safetensors"
    save_file({key: tensor for key, tensor in load_file(file).items() if "encoder.layers.0.fc1.weight" not in key}, file)
    with pytest.raises(CheckpointError, match=r"lacks 1 tensor.*encoder\.layers\.0\.fc1\.weight"):
        quantize_checkpoint(tmp_path / "float", tmp_path / "disk", template_of(model).get_config("int4_wo_32"))
    assert not (tmp_path / "disk").exists()


STREAMS = [f"{family}ForConditionalGeneration" for family in ("Bart", "Whisper", "T5", "Pegasus")]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.parametrize("scheme", ["int8", "int4_wo_32"])
def test_encoder_and_decoder_are_rounded_block_by_block_the_same_in_memory_and_from_disk(name: str, scheme: str, tmp_path: Path) -> None:
    random_model(name).save_pretrained(tmp_path / "float")  # type: ignore[operator]
    model = type(random_model(name)).from_pretrained(tmp_path / "float").eval()  # type: ignore[attr-defined]
    config = attrs.evolve(template_of(model).get_config(scheme), algo_config=[algorithms().load_config("gptq")()])
    data = [shifted(inputs_of(model), by) for by in range(4)]
    quantized = ModelQuantizer(config).quantize_model(model, data)
    blocks = [block.name for block in decoder_blocks(model, quantized.quark_plan.architecture)]
    assert [("encoder." in block, "decoder." in block) for block in blocks] == [(True, False)] * 2 + [(False, True)] * 2
    rounded = {row.name for row in quantized.quark_plan.rows if row.algorithm == "gptq"}
    assert all(any(row.startswith(f"{block}.") for row in rounded) for block in blocks)
    export_safetensors(quantized, tmp_path / "memory")
    quantize_checkpoint(tmp_path / "float", tmp_path / "disk", config, data)
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "memory" / file).read_bytes() == (tmp_path / "disk" / file).read_bytes()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", [*STREAMS, "DebertaV2ForTokenClassification", "CLIPModel"])
@pytest.mark.parametrize("algorithm", ["awq", "gptaq", "qronos"])
def test_algorithms_that_replay_or_look_ahead_serve_both_streams(name: str, algorithm: str, tmp_path: Path) -> None:
    model = random_model(name).requires_grad_(True)
    settings = algorithms().load_config(algorithm).for_architecture(architecture_of(model))  # type: ignore[attr-defined]
    if settings is None:
        pytest.skip("the family has nothing for it")
    config = attrs.evolve(template_of(model).get_config("int4_wo_32"), algo_config=[settings])
    data = [shifted(inputs_of(model), by) for by in range(4)]
    quantized = ModelQuantizer(config).quantize_model(model, data)
    assert all(output.isfinite().all() for output in outputs_of(quantized))


def shifted(inputs: dict[str, torch.Tensor], by: int) -> dict[str, torch.Tensor]:
    return {name: tensor.roll(by, -1) for name, tensor in inputs.items()}
