"""A family whose model class a plugin brings.

Its module is imported on every way to a model, and errors name the plugin.
"""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from quark.errors import AmbiguousNameError, CheckpointError, PluginError
from quark.models.hf.model_config import model_config
from quark.plugins import Catalog, using
from quark.plugins.discovery import Settings, discover
from quark.torch import import_model_from_safetensors
from quark_tiny_model import tiny_model_dir

from .program import run

FAMILY = "nova_trunk"
PLUGIN = """
import attrs
from quark.plugins import TemplateRecord, hookimpl
from quark.config.architecture import Architecture

FAMILY = Architecture(
    model_type="nova_trunk", decoder_blocks="model.layers", embeddings=["model.embed_tokens"], head="lm_head",
    kv_layers_name=["*k_proj", "*v_proj"], exclude_layers_name=["lm_head"],
)

@hookimpl
def quark_register_templates():
    yield TemplateRecord(name="nova_trunk", summary="a test", architecture=f"{__name__}:FAMILY", modeling=MODELING)
"""
MODELING = """
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM


class NovaConfig(LlamaConfig):
    model_type = "nova_trunk"

class NovaForCausalLM(LlamaForCausalLM):
    config_class = NovaConfig

AutoConfig.register("nova_trunk", NovaConfig)
AutoModelForCausalLM.register(NovaConfig, NovaForCausalLM)
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Catalog]]:
    """Install ``nova-quant 3.1``, whose template names the module, and whose module holds the code."""
    site = tmp_path / "site"
    monkeypatch.syspath_prepend(str(site))

    def installed(modeling: str | None = "nova_quant_modeling", code: str = MODELING, name: str = "nova-quant") -> Catalog:
        module = f"{name.replace('-', '_')}_plugin"
        info = site / f"{name.replace('-', '_')}-3.1.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 3.1\n")
        (info / "entry_points.txt").write_text(f"[quark]\nnova = {module}\n")
        (site / f"{module}.py").write_text(f"MODELING = {modeling!r}\n{PLUGIN}")
        (site / "nova_quant_modeling.py").write_text(code)
        importlib.invalidate_caches()
        return Catalog(discover([str(site), *sys.path]), Settings(strict=True))

    yield installed
    CONFIG_MAPPING._extra_content.pop(FAMILY, None)
    for registered in [c for c in AutoModelForCausalLM._model_mapping._extra_content if c.model_type == FAMILY]:
        del AutoModelForCausalLM._model_mapping._extra_content[registered]
    for imported in [m for m in sys.modules if m.startswith(("nova_quant", "rival_quant"))]:
        del sys.modules[imported]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """The bundled model as one of that family."""
    folder = Path(shutil.copytree(tiny_model_dir(), tmp_path / "nova"))
    of_family(folder)
    return folder


def of_family(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": FAMILY, "architectures": ["NovaForCausalLM"]}))


@pytest.mark.parametrize("options", [(), ("--dry-run",)], ids=["to the end", "its plan"])
def test_it_is_quantized(
    install: Callable[..., Catalog], checkpoint: Path, tmp_path: Path, options: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    with using(install()):
        assert run("quantize", checkpoint, tmp_path / "out", "--scheme", "int4_wo_64", *options, monkeypatch=monkeypatch) == 0
    assert (tmp_path / "out").exists() == (not options)


def test_it_is_evaluated(
    install: Callable[..., Catalog], checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with using(install()):
        assert run("evaluate", checkpoint, "--limit", 1, "--seq-len", 16, "--json", monkeypatch=monkeypatch) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["perplexity"] > 1


def test_its_export_is_read(install: Callable[..., Catalog], checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Quantized as what it is a copy of, so that nothing has imported the class when the export is read.
    out = tmp_path / "out"
    assert run("quantize", tiny_model_dir(), out, "--scheme", "int4_wo_64", monkeypatch=monkeypatch) == 0
    plain = import_model_from_safetensors(None, out, device="cpu")
    of_family(out)
    assert FAMILY not in CONFIG_MAPPING
    with using(install()):
        own = import_model_from_safetensors(None, out, device="cpu")
    assert type(own).__name__ == "NovaForCausalLM"
    tokens = torch.arange(8)[None]
    with torch.no_grad():
        assert torch.equal(own(tokens).logits, plain(tokens).logits)


def test_the_module_is_imported_for_its_own_family_only(install: Callable[..., Catalog]) -> None:
    with using(install(code="1 / 0")):
        assert model_config(tiny_model_dir()).model_type == "llama"


def test_a_family_that_nobody_knows_is_told_with_what_to_install(checkpoint: Path) -> None:
    with (
        using(Catalog()),
        pytest.raises(CheckpointError, match=r"model type 'nova_trunk'.*no installed distribution provides this model family"),
    ):
        model_config(checkpoint)


@pytest.mark.parametrize(
    ("record", "code", "error", "says"),
    [
        (None, MODELING, CheckpointError, r"plugin 'nova' of nova-quant 3\.1 .*names no module"),
        ("nova_quant_nowhere", MODELING, PluginError, r"'nova_quant_nowhere', which cannot be imported .*nova-quant 3\.1"),
        ("nova_quant_modeling", "1 / 0", PluginError, r"ZeroDivisionError: division by zero.*nova-quant 3\.1"),
        ("nova_quant_modeling", "", CheckpointError, r"nova-quant 3\.1 .*does not register the model type with AutoConfig\.register"),
    ],
    ids=["no module named", "a module that is not there", "a module that breaks", "a module that registers nothing"],
)
def test_what_is_wrong_with_the_module_names_the_distribution(
    install: Callable[..., Catalog], checkpoint: Path, record: str | None, code: str, error: type[Exception], says: str
) -> None:
    with using(install(record, code)), pytest.raises(error, match=says):
        model_config(checkpoint)


def test_a_family_that_two_distributions_claim_is_contested(install: Callable[..., Catalog], checkpoint: Path) -> None:
    install(name="rival-quant")
    with using(install()), pytest.raises(AmbiguousNameError, match=r"claimed by .*nova-quant .*rival-quant"):
        model_config(checkpoint)


def test_a_module_is_named_and_not_pathed() -> None:
    from quark.plugins import TemplateRecord

    for wrong in ("nova/modeling.py", "nova.modeling:Nova", ""):
        with pytest.raises(ValueError, match="is not the name of a module"):
            TemplateRecord(name="nova", architecture="nova:FAMILY", modeling=wrong)
