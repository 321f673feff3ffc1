"""Measure how well algorithms quantize experts that get few tokens, on the tiny mixture-of-experts model.

    python -m benchmarks.experts [--algorithms gptq,awq,awq+gptq] [--calibration 8,2] [--scheme int4_wo_64]

The program measures each algorithm with each number of calibration windows of 256 tokens. For each of these,
it prints the model's KL divergence without and with ``calibrate_all_experts``. It prints one more line for
each expert: the expert's number of calibration tokens, and the squared error of the expert's output ÷ the
same error with round-to-nearest. The error of an expert is measured on those tokens of the held-out text that
the float model routes to the expert. Calibration uses the end of the text, and evaluation the beginning.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from quark.models.plan.mixtures import separate_experts
from quark.torch import ModelQuantizer
from quark_tiny_model import calibration_batches, held_out_text, tiny_model, tiny_template, tiny_tokenizer
from quark_workbench.evaluate import compare, token_windows

LENGTH, EVALUATED = 256, 48
Experts = Mapping[str, nn.Module]


def quantized(algorithm: str, scheme: str, windows: int, *, all_experts: bool = False) -> Any:
    """Return the quantized tiny mixture-of-experts model; an empty ``algorithm`` means round-to-nearest."""
    config = tiny_template("mixture").get_config(scheme=scheme, algorithm=algorithm.split("+") if algorithm else None)
    config.calibrate_all_experts = all_experts
    data = calibration_batches(windows, LENGTH) if algorithm else None
    return ModelQuantizer(config).quantize_model(tiny_model(kind="mixture"), data)


def float_model(scheme: str) -> nn.Module:
    """Return the float tiny mixture-of-experts model, in which each expert is a module."""
    model = tiny_model(kind="mixture")
    separate_experts(model, tiny_template("mixture").get_config(scheme=scheme), set())
    return model


def experts_of(model: nn.Module) -> dict[str, Any]:
    """Return a dictionary from name to expert."""
    return {name: module for name, module in model.named_modules() if ".experts." in name and hasattr(module, "down_proj")}


def inputs_of(model: nn.Module, tokens: Tensor) -> dict[str, Tensor]:
    """Return a dictionary from expert to inputs, ``[tokens, channels]``.

    Experts that get no tokens are left out.
    """
    arrived: dict[str, list[Tensor]] = {}

    def keep(name: str) -> Any:
        return lambda _, args: arrived.setdefault(name, []).append(args[0].reshape(-1, args[0].shape[-1]))

    hooks = [expert.gate_proj.register_forward_pre_hook(keep(name)) for name, expert in experts_of(model).items()]
    with torch.no_grad():
        model(tokens)
    for hook in hooks:
        hook.remove()
    return {name: torch.cat(parts) for name, parts in arrived.items()}


def errors(model: nn.Module, reference: nn.Module, inputs: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the squared output error of each expert.

    ``inputs`` are those of the float model. If an equalization has moved scales from the norm into the
    experts of ``model``, these experts get the inputs divided by the scales.
    """
    found, floats, experts = {}, experts_of(reference), experts_of(model)
    for name, x in inputs.items():
        norm = f"{name.partition('.mlp.')[0]}.post_attention_layernorm"
        moved = model.get_submodule(norm).weight / reference.get_submodule(norm).weight
        with torch.no_grad():
            outputs = [_output(experts[name], x * moved), _output(floats[name], x)]
        found[name] = float((outputs[0] - outputs[1]).square().sum())
    return found


def _output(expert: Any, x: Tensor) -> Tensor:
    return expert.down_proj(nn.functional.silu(expert.gate_proj(x)) * expert.up_proj(x))  # type: ignore[no-any-return]


def lines(algorithms: list[str], scheme: str, windows: int) -> Iterator[str]:
    """Yield the lines of the output for one number of calibration windows."""
    text = token_windows(tiny_tokenizer(), held_out_text(), LENGTH, limit=EVALUATED)
    reference = float_model(scheme)
    inputs = inputs_of(reference, text)
    nearest = quantized("", scheme, windows)
    least, by_algorithm, counts = errors(nearest, reference, inputs), {}, {}
    yield f"{windows} x {LENGTH} tokens; nearest: KL {compare(nearest, tiny_model(kind='mixture'), text.split(4)).mean_kl:.4f}"
    for algorithm in algorithms:
        for all_experts in (False, True):
            model = quantized(algorithm, scheme, windows, all_experts=all_experts)
            result = compare(model, tiny_model(kind="mixture"), text.split(4))
            name = f"{algorithm}, all experts" if all_experts else algorithm
            yield f"{name}: KL {result.mean_kl:.4f} ± {result.mean_kl_error:.4f}"
            by_algorithm[name] = errors(model, reference, inputs)
            counts = counts or dict(model.quark_report.tokens)
    for name in sorted(inputs, key=lambda name: counts[f"{name}.gate_proj"]):
        ratios = "  ".join(f"{algorithm} {found[name] / least[name]:.2f}" for algorithm, found in by_algorithm.items())
        yield f"{name}  {counts[f'{name}.gate_proj']} tokens  {ratios}"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithms", default="gptq,awq,awq+gptq")
    parser.add_argument("--calibration", default="8,2")
    parser.add_argument("--scheme", default="int4_wo_64")
    args = parser.parse_args(arguments)
    logging.getLogger("quark").setLevel(logging.ERROR)
    for windows in args.calibration.split(","):
        for text in lines(args.algorithms.split(","), args.scheme, int(windows)):
            print(text, flush=True)


if __name__ == "__main__":
    main()
