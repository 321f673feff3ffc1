"""The methods that `quark inspect` names are those that vLLM's own readers choose, of configurations alone: no GPU and no weight is needed.

Run with ``make clients VLLM_PYTHON=/path/to/python`` of an environment with vLLM.
"""

import json
from pathlib import Path

import pytest

import quark
from quark.checkpoint.export import export_with
from quark.checkpoint.inspection import inspect_checkpoint
from quark.errors import UnsupportedError
from quark_devkit.small_models import quantized, run_config
from quark_exporters.runtimes.inspector import rule_for

from .vllm_on_cpu import run

pytestmark = pytest.mark.clients
LAYER = "model.layers.0.mlp.down_proj"
_CHOOSE = """
import json, sys
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.linear import RowParallelLinear
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.quantization.quark.quark import QuarkConfig
from vllm.model_executor.layers.quantization.quark.quark_moe import QuarkMoEMethod
from vllm.model_executor.layers.quantization.compressed_tensors import schemes
for scheme in vars(schemes).values():  # which one is chosen is asked, and not whether this machine has a kernel for it
    if isinstance(scheme, type):
        scheme.__init__ = lambda self, *_, **__: None
def chosen(block):
    if sys.argv[3].endswith("experts"):
        config = QuarkConfig.from_config(block)
        return QuarkMoEMethod.get_moe_method_target(config, RoutedExperts, sys.argv[3])[2].__name__
    if block["quant_method"] == "quark":
        return QuarkConfig.from_config(block).get_scheme_cls(RowParallelLinear, sys.argv[3])[2].__name__
    config = CompressedTensorsConfig.from_config(block)
    own = config.target_scheme_map["Linear"]
    made = config._get_scheme_from_parts(own["weights"], own["input_activations"], own["output_activations"], own["format"])
    return type(made).__name__
found = {}
with set_current_vllm_config(VllmConfig()):
    for name, block in json.load(open(sys.argv[1])).items():
        try:
            found[name] = chosen(block)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
json.dump(found, open(sys.argv[2], "w"))
"""


@pytest.mark.timeout(900)
def test_vllm_chooses_the_methods_that_the_rules_name(tmp_path: Path) -> None:
    blocks, named = {}, {}
    for layout in ("safetensors", "compressed_tensors"):
        for scheme in (s for s in quark.schemes().names() if "128" not in s):
            out = tmp_path / f"{layout}-{scheme}"
            try:
                export_with(layout, quantized(run_config(scheme)), out)
            except UnsupportedError:
                continue
            blocks[out.name] = json.loads((out / "config.json").read_text())["quantization_config"]
            runtimes = [support for support in inspect_checkpoint(out).runtimes if support.runtime.startswith("vllm_")]  # its own
            named[out.name] = {method.partition(":")[0] for support in runtimes for method in support.methods}
    (tmp_path / "blocks").write_text(json.dumps(blocks))
    run(_CHOOSE, tmp_path, str(tmp_path / "blocks"), str(tmp_path / "found"), LAYER)
    found = json.loads((tmp_path / "found").read_text())
    print(json.dumps({name: [found[name], sorted(named[name])] for name in found}, indent=1))
    wrong = {
        name: (found[name], named[name]) for name in found if ({found[name]} != named[name]) and (named[name] or ":" not in found[name])
    }
    assert wrong == {}


@pytest.mark.timeout(900)
def test_vllm_chooses_the_methods_of_experts_that_the_rules_name(tmp_path: Path) -> None:
    blocks, named = {}, {}
    for scheme in (s for s in quark.schemes().names() if "128" not in s):
        config = run_config(scheme)
        export_with("safetensors", quantized(config), tmp_path / scheme)
        blocks[scheme] = json.loads((tmp_path / scheme / "config.json").read_text())["quantization_config"]
        rule = rule_for("safetensors", quark.schemes().load_config(scheme)(), experts=True)
        named[scheme] = None if rule is None else rule.method
    (tmp_path / "blocks").write_text(json.dumps(blocks))
    run(_CHOOSE, tmp_path, str(tmp_path / "blocks"), str(tmp_path / "found"), "model.layers.0.mlp.experts")
    found = json.loads((tmp_path / "found").read_text())
    assert {name: None if ":" in method else method for name, method in found.items()} == named
