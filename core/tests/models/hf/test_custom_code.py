"""Checkpoints with their own code: refused in one sentence, and run if the caller allows it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from quark.checkpoint import import_model_from_safetensors
from quark.errors import QuarkError, UnsupportedError
from quark.models.hf.custom_code import code_files
from quark.models.hf.loading import load_model
from quark.models.hf.model_config import model_config
from quark.models.hf.skeleton import meta_model
from quark.models.hf.tokenizer import load_tokenizer
from quark.runs import quantize_checkpoint
from quark.torch import LLMTemplate
from quark_tiny_model import tiny_model_dir
from quark_workbench.cli.main import program

MODELING = """
from transformers import LlamaConfig, LlamaForCausalLM
from .parts_of_tiny import SCALE

class TinyConfig(LlamaConfig):
    model_type = "tiny_of_its_own"

class TinyForCausalLM(LlamaForCausalLM):
    config_class = TinyConfig

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = SCALE * output.logits
        return output
"""
AUTO_MAP = {"AutoConfig": "modeling_tiny.TinyConfig", "AutoModelForCausalLM": "modeling_tiny.TinyForCausalLM"}


@pytest.fixture(scope="module", autouse=True)
def modules_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache of modules for these tests; one for all, since its package is imported once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path_factory.mktemp("modules")))
        yield


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """The bundled checkpoint as a model type that its own code defines."""
    shutil.copytree(tiny_model_dir(), tmp_path / "source")
    changed(tmp_path / "source" / "config.json", model_type="tiny_of_its_own", architectures=["TinyForCausalLM"], auto_map=AUTO_MAP)
    (tmp_path / "source" / "modeling_tiny.py").write_text(MODELING)
    (tmp_path / "source" / "parts_of_tiny.py").write_text("SCALE = 2.0\n")
    return tmp_path / "source"


def changed(file: Path, **values: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


REFUSED = r"config\.json' needs code from the checkpoint \(modeling_tiny\.py\), which quark runs only if you allow it.*--trust-remote-code"


def test_a_model_that_needs_code_is_refused_before_any_of_it_runs(source: Path, tmp_path: Path) -> None:
    (source / "modeling_tiny.py").write_text("raise SystemExit('it was run')")
    for read in (model_config, meta_model, load_model):
        with pytest.raises(UnsupportedError, match=REFUSED):
            read(source)  # type: ignore[operator]
    with pytest.raises(UnsupportedError, match=REFUSED):
        quantize_checkpoint(source, tmp_path / "out", LLMTemplate.get("llama").get_config("int4_wo_64"))
    assert not (tmp_path / "out").exists()


def test_the_command_refuses_it_without_the_option(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["quantize", str(source), str(tmp_path / "out"), "--scheme", "int4_wo_64", "--dry-run"]
    with pytest.raises(QuarkError, match=REFUSED):
        program()(arguments, standalone_mode=False)
    program()([*arguments, "--trust-remote-code"], standalone_mode=False)
    assert "model.layers" in capsys.readouterr().out


def test_every_command_that_reads_an_export_runs_its_code_only_with_the_option(source: Path, tmp_path: Path) -> None:
    text, out = tmp_path / "text.txt", tmp_path / "out"
    text.write_text("In the beginning God created the heaven and the earth.\n" * 40)
    few = ["--num-calib", "2", "--seq-len", "16"]
    quantize_checkpoint(source, out, LLMTemplate.get("llama").get_config("int4_wo_64"), trust_remote_code=True)
    for arguments in (
        ["inspect", str(out)],
        ["evaluate", str(out), "--text", str(text), "--seq-len", "16", "--limit", "2"],
        ["report", str(out), "--to", str(tmp_path / "to"), "--float", str(source), "--calib", str(text), *few],
    ):
        with pytest.raises(QuarkError, match=REFUSED):
            program()(arguments, standalone_mode=False)
        program()([*arguments, "--trust-remote-code"], standalone_mode=False)
    contents = json.loads((tmp_path / "to" / "quark_report.json").read_text())
    assert contents["depth"]["blocks"]
    assert contents["evaluation"]


def test_a_known_config_with_a_model_of_its_own_is_refused_too(source: Path) -> None:
    changed(source / "config.json", model_type="llama", auto_map={"AutoModelForCausalLM": AUTO_MAP["AutoModelForCausalLM"]})
    with pytest.raises(UnsupportedError, match=REFUSED):
        model_config(source)


def test_code_that_transformers_has_itself_is_not_needed(source: Path) -> None:
    changed(source / "config.json", model_type="llama", architectures=["LlamaForCausalLM"])
    assert type(meta_model(source)).__name__ == "LlamaForCausalLM"
    assert type(meta_model(source)).__module__.startswith("transformers.models")


def test_with_trust_it_is_quantized_and_the_code_goes_with_the_result(source: Path, tmp_path: Path) -> None:
    model = load_model(source, trust_remote_code=True)
    plain = load_model(tiny_model_dir())
    ids = torch.arange(3, 19)[None]
    assert torch.equal(model(ids).logits, 2 * plain(ids).logits)
    config = LLMTemplate.get("llama").get_config("int4_wo_64")
    quantize_checkpoint(source, tmp_path / "out", config, trust_remote_code=True)
    quantize_checkpoint(tiny_model_dir(), tmp_path / "plain", config)
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (tmp_path / "plain" / "model.safetensors").read_bytes()
    assert (tmp_path / "out" / "modeling_tiny.py").read_text() == MODELING
    assert (tmp_path / "out" / "parts_of_tiny.py").is_file()
    assert json.loads((tmp_path / "out" / "config.json").read_text())["auto_map"] == AUTO_MAP
    with pytest.raises(UnsupportedError, match=REFUSED):
        import_model_from_safetensors(None, tmp_path / "out", device="cpu")
    again = import_model_from_safetensors(None, tmp_path / "out", device="cpu", trust_remote_code=True)
    expected = import_model_from_safetensors(None, tmp_path / "plain", device="cpu")
    assert torch.equal(again(ids).logits, 2 * expected(ids).logits)


def test_a_tokenizer_that_needs_code_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": ["tokenization_own.OwnTokenizer", None]}})
    )
    (tmp_path / "tokenization_own.py").write_text("raise SystemExit('it was run')")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UnsupportedError, match=r"tokenizer_config\.json' needs code .*tokenization_own\.py"):
        load_tokenizer(tmp_path)


def test_files_are_named_once_and_without_their_repository(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"auto_map": {"A": "acme/model--one.A", "B": ["one.B", None], "C": "two.C", "D": 3}}))
    assert code_files(path) == ["one.py", "two.py"]
    assert code_files(tmp_path / "absent.json") == []
