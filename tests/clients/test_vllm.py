"""vLLM loads our exports with its strict check for missing tensors, and generates what our own simulation generates.

Run with ``make clients VLLM_PYTHON=/path/to/python`` of an environment with vLLM; quark need not be installed there.
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, Qwen3Config

from quark.testing.tiny import calibration_batches, tiny_model, tiny_tokenizer
from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors, import_model_from_safetensors

pytestmark = pytest.mark.clients
CODE = """
import json, sys
def main():
    from vllm import LLM, SamplingParams
    llm = LLM(model=sys.argv[1], dtype="bfloat16", kv_cache_dtype=sys.argv[2], enforce_eager=True, max_model_len=256,
              model_loader_extra_config={"enable_weights_track": True})
    found = llm.generate(json.loads(sys.argv[3]), SamplingParams(temperature=0, max_tokens=24))
    print("RESULT" + json.dumps([[list(f.prompt_token_ids), list(f.outputs[0].token_ids)] for f in found]))
if __name__ == "__main__":
    main()
"""
PROMPTS = ["And God said, Let there be", "In the beginning", "PATIENCE, n."]
GAPS = {"auto": 0.125, "fp8": 0.75}
"""Largest difference, in nats, between our best token and vLLM's choice after the same words, by cache. Its kernels compute in bfloat16 and
round int8 activations anew; the largest seen is 0.063. With an FP8 cache of the same keys and values that our simulation rounds, behind the
rotary embedding, the largest seen is 0.47."""
MEAN_GAPS = {"auto": 0.01, "fp8": 0.03}
"""Mean of these differences over all generated tokens. The largest seen with an FP8 cache is 0.016; with the scale of other keys than those
that are cached, 34 of 72 choices were the same, and single differences were 7."""
AGREE = 0.9
"""Share of tokens on which both choose the same. One case does not reach it: ptpc_fp8 with an FP8 cache, 63 of 72, unexplained."""


def generated(directory: Path, cache: str) -> list[list[list[int]]]:
    """What vLLM generates: prompt and new tokens of each prompt."""
    python = os.environ.get("VLLM_PYTHON")
    if not python:
        pytest.skip("VLLM_PYTHON names no interpreter with vLLM")
    environ = {
        **{k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
    }
    script = directory.parent / "generate.py"
    script.write_text(CODE)
    command = [python, str(script), str(directory), cache, json.dumps(PROMPTS)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=1500, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    assert lines, done.stderr[-3000:]
    return json.loads(lines[0].removeprefix("RESULT"))


@pytest.mark.timeout(1600)
@pytest.mark.parametrize("cache", ["auto", "fp8"])
@pytest.mark.parametrize("scheme", ["int4_wo_128", "uint4_wo_64", "int8", "ptpc_fp8"])
def test_vllm_loads_and_generates(scheme: str, cache: str, tmp_path: Path) -> None:
    config = LLMTemplate.get("llama").get_config(scheme=scheme, kv_cache_scheme="fp8" if cache == "fp8" else None)
    model = ModelQuantizer(config).quantize_model(tiny_model(torch.bfloat16), calibration_batches(2, 128))
    generates_what_ours_would(model, cache, tmp_path)


@pytest.mark.timeout(1600)
def test_keys_behind_a_norm_have_the_scale_of_what_is_cached(tmp_path: Path) -> None:
    """The norm makes keys ten times as large; cached with the scale of what the projection gives, nearly all of them would saturate.

    With that scale (``kv_cache_post_rope=False``) the largest gap was 7 nats, and 34 of 72 tokens were the same.
    """
    config = LLMTemplate.get("qwen3").get_config(scheme="int8", kv_cache_scheme="fp8")
    model = ModelQuantizer(config).quantize_model(with_norms_of_heads(), calibration_batches(2, 128))
    generates_what_ours_would(model, "fp8", tmp_path)


def with_norms_of_heads() -> nn.Module:
    """The bundled model as a Qwen3: queries and keys have norms."""
    tiny = tiny_model(torch.bfloat16)
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    others = ("head_dim", "max_position_embeddings", "tie_word_embeddings", "rms_norm_eps", "bos_token_id", "eos_token_id")
    found: Any = tiny.config
    config = Qwen3Config(pad_token_id=found.pad_token_id, **{name: getattr(found, name) for name in (*names, *others)})
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    assert all("_norm" in name for name in model.load_state_dict(tiny.state_dict(), strict=False).missing_keys)
    for block in model.model.layers:
        block.self_attn.k_norm.weight.data *= 10
        block.self_attn.q_norm.weight.data *= 0.05
    return model  # type: ignore[no-any-return]


def generates_what_ours_would(model: nn.Module, cache: str, folder: Path) -> None:
    """Export ``model``, generate from the export, and compare with what our simulation of it would generate after the same words."""
    export_safetensors(model, folder / "out")
    tiny_tokenizer().save_pretrained(folder / "out")
    ours = import_model_from_safetensors(None, folder / "out")
    all_gaps = []
    for prompt, new in generated(folder / "out", cache):
        with torch.no_grad():
            logits = ours(torch.tensor([prompt + new])).logits.float().log_softmax(-1)[0, len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(new)[:, None])[:, 0]
        gaps = logits.amax(1) - chosen
        assert gaps.max() <= GAPS[cache]
        all_gaps += gaps.tolist()
    assert sum(all_gaps) <= MEAN_GAPS[cache] * len(all_gaps)
    assert sum(gap == 0 for gap in all_gaps) >= AGREE * len(all_gaps)
