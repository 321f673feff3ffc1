"""Laws of runs on an accelerator, simulated: the results are the CPU's, the host waits seldom, and memory holds one block."""

from __future__ import annotations

import copy
import gc
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quark.config.model import QConfig
from quark.plugins import schemes
from quark.runs import ModelQuantizer, quantize_checkpoint, source
from quark.torch import LLMTemplate
from quark_devkit.simulated_device import NAME, SimulatedDevice, simulated_device

pytestmark = pytest.mark.thorough

SCHEMES = schemes().names()
ALGORITHMS: dict[str, tuple[str, ...]] = {
    "rtn": (),
    "gptq": ("gptq",),
    "gptaq": ("gptaq",),
    "qronos": ("qronos",),
    "awq": ("awq",),
    "smoothquant": ("smoothquant",),
    "autosmoothquant": ("autosmoothquant",),
    "rotation": ("rotation",),
    "gptq+tuning": ("gptq", "tuning"),
    "autoround": ("autoround",),
    "awq+gptq": ("awq", "gptq"),
}
SOLVED = ("gptaq", "qronos")
"""Algorithms that solve systems with the factor of the Hessian: on CPUs panels make it, else LAPACK, and it
lies otherwise in memory.
"""
QUICK = {("rtn", "mx6"), ("gptq", "int8"), ("gptq", "nvfp4"), ("awq", "int8"), ("rotation", "mxfp4"), ("awq+gptq", "uint4_wo_32")} | {
    (algorithm, "int4_wo_32") for algorithm in ("gptaq", "qronos", "smoothquant", "autosmoothquant", "gptq+tuning", "autoround")
}
"""Pairs outside of the slow tests: each algorithm, and each way of storing scales."""
_DTYPE = {"compute_dtype": "bfloat16"}  # the default goes by the device
STEPS: dict[str, dict[str, Any]] = {"tuning": {"epochs": 2} | _DTYPE, "autoround": {"iters": 2} | _DTYPE}


def llama(hidden: int = 64, blocks: int = 1, **other: Any) -> Any:
    """A model of random weights.

    Its attention is written out: torch has other kernels of the fused one for each kind of device.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": hidden, "intermediate_size": 128, "num_hidden_layers": blocks, "vocab_size": 96} | other
    config = LlamaConfig(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0, **sizes)
    config._attn_implementation = "eager"
    return LlamaForCausalLM(config).eval().requires_grad_(False)


def gpt2() -> Any:
    """Transposed weights, biases, no rotary embedding."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=96, n_positions=64, n_embd=32, n_layer=1, n_head=4, bos_token_id=1, eos_token_id=2)
    config._attn_implementation = "eager"
    return GPT2LMHeadModel(config).eval().requires_grad_(False)


def mixtral() -> Any:
    """Fused experts; each token reads two of them."""
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_local_experts": 4, "vocab_size": 96}
    config = MixtralConfig(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0, **sizes)
    config._attn_implementation = "eager"
    return MixtralForCausalLM(config).eval().requires_grad_(False)


def tokens(count: int = 2, length: int = 32, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 96, (1, length), generator=generator) for _ in range(count)]


def config(model: Any, scheme: str, algorithms: Sequence[str], **steps: dict[str, Any]) -> QConfig:
    made = LLMTemplate.get(model.config.model_type).get_config(scheme=scheme, algorithm=list(algorithms))
    for settings in made.algo_config or []:
        for name, value in (STEPS | steps).get(settings.name, {}).items():
            setattr(settings, name, value)
    return made


def quantized(model: nn.Module, plan: QConfig, data: list[Tensor]) -> Any:
    return ModelQuantizer(plan).quantize_model(copy.deepcopy(model), data)


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.cpu() for name, value in model.state_dict().items() if isinstance(value, Tensor)}


def logits(model: Any, data: list[Tensor]) -> Tensor:
    with torch.no_grad():
        return torch.cat([model(x.to(model.device)).logits[0] for x in data]).cpu()


def assert_same_on_device(model: Any, plan: QConfig, data: list[Tensor]) -> None:
    """The run on the device gives the tensors, the logits and the report of the run on the CPU."""
    expected = quantized(model, plan, data)
    with simulated_device():
        found = quantized(copy.deepcopy(model).to(NAME), plan, data)
        elsewhere = [n for n, t in found.state_dict().items() if isinstance(t, Tensor) and t.device.type != NAME]
        assert elsewhere == []
        one, other = state(expected), state(found)
        assert [n for n in one if not torch.equal(one[n], other[n])] == []
        assert one.keys() == other.keys()
        assert torch.equal(logits(expected, tokens(1, seed=1)), logits(found, tokens(1, seed=1)))
    assert found.quark_report.layers == expected.quark_report.layers
    assert found.quark_report.weights == expected.quark_report.weights


def pairs() -> list[Any]:
    every = [(a, s) for a in ALGORITHMS for s in SCHEMES]
    return [pytest.param(a, s, marks=() if (a, s) in QUICK else (pytest.mark.slow,)) for a, s in every]


def assert_as_good_on_device(model: Any, plan: QConfig, data: list[Tensor]) -> None:
    """The run on the device makes the error of that on the CPU, and for the most part the same error.

    The last bit of a sum decides a tie, and what is rounded behind it follows. Two roundings that had nothing
    in common would differ by twice the mean square error of each.
    """
    expected = quantized(model, plan, data)
    with simulated_device():
        found = quantized(copy.deepcopy(model).to(NAME), plan, data)
    floats, *rounded = (logits(each, tokens(seed=1)) for each in (model, expected, found))
    errors = [float((each - floats).square().mean()) for each in rounded]
    assert errors[1] == pytest.approx(errors[0], rel=0.05)
    assert float((rounded[1] - rounded[0]).square().mean()) < errors[0] / 4


@pytest.mark.parametrize(("algorithm", "scheme"), pairs())
def test_a_model_on_the_device_is_quantized_as_on_the_cpu(algorithm: str, scheme: str) -> None:
    model = llama(128 if "128" in scheme else 64)
    check = assert_as_good_on_device if algorithm in SOLVED else assert_same_on_device
    check(model, config(model, scheme, ALGORITHMS[algorithm]), tokens())


@pytest.mark.parametrize("algorithm", ["gptq", "awq", "rotation"])
@pytest.mark.parametrize("family", [gpt2, mixtral])
def test_so_is_one_with_biases_and_one_with_experts(family: Any, algorithm: str) -> None:
    model = family()
    if family is gpt2 and algorithm == "rotation":
        pytest.skip("no rotation for this family")
    assert_same_on_device(model, config(model, "int4_wo_32", [algorithm]), tokens(4))


def test_so_is_one_with_padding_and_one_that_is_passed_twice() -> None:
    model = llama()
    mask = torch.ones(2, 32, dtype=torch.long)
    mask[1, :20] = 0
    data = [{"input_ids": torch.cat(tokens(2, seed=i)), "attention_mask": mask} for i in range(2)]
    plan = config(model, "int8", ["awq", "gptq"])
    assert_same_on_device(model, plan, data)  # type: ignore[arg-type]
    plan.activation_memory = 0
    assert_same_on_device(model, plan, data)  # type: ignore[arg-type]


def test_so_is_one_in_16_bits_up_to_the_precision_of_its_products() -> None:
    """Statistics of 16-bit inputs are sums of exact products there, in another order."""
    model = llama().to(torch.bfloat16)
    plan, data = config(model, "int4_wo_32", ["gptq"]), tokens()
    assert_as_good_on_device(model, plan, data)


def saved(model: Any, directory: Path) -> Path:
    """The model as a checkpoint, which says that its attention is written out."""
    model.save_pretrained(directory)
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"attn_implementation": "eager", "_attn_implementation": "eager"}))
    return directory


def files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file() and path.name != "quark_run.json"}


@pytest.mark.parametrize(
    ("scheme", "algorithms"),
    [("int4_wo_32", ()), ("int8", ("gptq",)), ("nvfp4", ("awq", "gptq")), ("int4_wo_32", ("gptq", "tuning")), ("mxfp4", ("rotation",))],
)
def test_a_checkpoint_is_quantized_block_by_block_on_the_device_to_the_same_bytes(
    scheme: str, algorithms: tuple[str, ...], tmp_path: Path
) -> None:
    model = llama(blocks=2)
    saved(model, tmp_path / "float")
    plan = config(model, scheme, algorithms)
    for device, name in (("cpu", "one"), (NAME, "other")):
        with simulated_device():
            quantize_checkpoint(tmp_path / "float", tmp_path / name, plan, tokens(), device=device)
    assert files(tmp_path / "one") == files(tmp_path / "other")


def run_from_disk(directory: Path, plan: QConfig, data: list[Tensor], out: str) -> SimulatedDevice:
    gc.collect()
    with simulated_device() as device:
        before = device.bytes
        quantize_checkpoint(directory, directory.with_name(f"{directory.name}-{out}"), plan, data, device=NAME)
        device.peak -= before
        return device


@pytest.mark.parametrize("algorithms", [pytest.param((), marks=pytest.mark.slow), ("awq", "gptq", "tuning")])
def test_the_memory_of_the_device_does_not_grow_with_the_number_of_blocks(
    algorithms: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One block, statistics and activations lie there, and the modules outside of the blocks."""
    monkeypatch.setattr(source, "LEAST_ROOM", math.inf)  # a block that is read ahead may be there at the peak, or be too late
    peaks = []
    for blocks in (2, 4):
        model = llama(blocks=blocks)
        directory = saved(model, tmp_path / str(blocks))
        peaks.append(run_from_disk(directory, config(model, "int4_wo_32", algorithms), tokens(), "out").peak)
    size = sum(p.nbytes for p in model.model.layers[0].parameters())
    assert peaks[1] - peaks[0] < size / 10  # of two more blocks


def waits(hidden: int, samples: int, epochs: int, algorithms: Sequence[str], scheme: str) -> dict[str, int]:
    """How often the host waits for the device in our code, by place, in a run of a model in memory."""
    model = llama(hidden, intermediate_size=2 * hidden)
    steps = {"tuning": {"epochs": epochs}, "autoround": {"iters": epochs}}
    plan = config(model, scheme, algorithms, **steps)
    with simulated_device() as device:
        there = model.to(NAME)
        device.waits.clear()
        ModelQuantizer(plan).quantize_model(there, tokens(samples))
        return {place: count for place, count in device.counted().items() if not place.startswith("transformers/")}


PER_LAYER = {"gptq": 9, "awq+gptq": 24}
"""How often the host may wait for each layer: for a figure or a decision of the layer, of its Hessian, of its
mapping, of the block.
"""


@pytest.mark.one_in(2)
@pytest.mark.parametrize("scheme", ["int4_wo_32", "int8"])
@pytest.mark.parametrize("algorithm", PER_LAYER)
def test_the_host_waits_a_few_times_for_a_layer_however_many_columns_groups_and_samples_there_are(algorithm: str, scheme: str) -> None:
    for hidden, samples in ((64, 2), (128, 4)):
        found = waits(hidden, samples, 1, ALGORITHMS[algorithm], scheme)
        assert sum(found.values()) <= PER_LAYER[algorithm] * 7, found


def test_the_host_waits_no_more_often_for_a_block_that_is_tuned_in_more_steps_but_once_for_each_epoch() -> None:
    short, long = (sum(waits(64, 2, epochs, ALGORITHMS["gptq+tuning"], "int4_wo_32").values()) for epochs in (2, 4))
    assert long - short <= 2
