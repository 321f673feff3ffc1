"""Measure the KL divergence between a float model and the same model with a quantized KV cache.

    python -m benchmarks.caches TEXT_DIR MODEL… [--caches fp8,fp8_per_head,int8,nvfp4] [--windows 8]
                                [--length 512]

A MODEL is a directory, or ``NAME=DIRECTORY``; the texts come from `benchmarks.texts`. Calibration uses
windows from the first half of ``foldoc``. Evaluation uses windows from the second half of ``foldoc`` and the
second half of ``devil``. The program prints a table with a row for each model. The cells are means over the
windows, with their standard errors.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import attrs

from benchmarks.defaults import places
from benchmarks.model_kinds import LanguageModel
from benchmarks.paired import Difference
from quark.base.log import silenced
from quark.config.layer import QLayerConfig
from quark.config.model import QConfig
from quark.models.hf.loading import load_model
from quark.models.hf.tokenizer import load_tokenizer
from quark.torch import LLMTemplate, ModelQuantizer

__all__ = ["cache_alone", "main"]

CALIBRATION, EVALUATION = "foldoc", ("foldoc", "devil")


def cache_alone(model_type: str, scheme: str) -> QConfig:
    """Return a configuration that quantizes only the KV cache, in the given scheme."""
    config = LLMTemplate.get(model_type).get_config(scheme, kv_cache_scheme=scheme)
    cached = {name: QLayerConfig(output_tensors=layer.output_tensors) for name, layer in config.kv_cache_quant_config.items()}
    return attrs.evolve(config, global_quant_config=QLayerConfig(), layer_quant_config=deepcopy(cached), kv_cache_quant_config=cached)


def row(name: str, path: Path, args: argparse.Namespace) -> str:
    """Return one model's row of the table: the divergence with each quantized cache."""
    reference: Any = load_model(path, dtype="float32")
    kind = LanguageModel(reference, path, load_tokenizer(path), args.text)
    calibration = kind.calibration(CALIBRATION, args.windows, args.length)
    batches = [batch for text in EVALUATION for batch in kind.batches(text, 1, args.windows, args.length)]
    models = {}
    for cache in args.caches:
        with silenced():
            models[cache] = ModelQuantizer(cache_alone(reference.config.model_type, cache)).quantize_model(deepcopy(reference), calibration)
    values = kind.values(models, batches)
    means = [Difference.of(values[cache]["kl"]) for cache in args.caches]
    return " | ".join(["", name, *(f"{mean.mean:.5f} ± {mean.error or 0:.5f}" for mean in means), ""]).strip()


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table with a row for each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("--caches", default=["fp8", "fp8_per_head", "int8", "nvfp4"], type=lambda text: text.split(","))
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--length", type=int, default=512)
    args = parser.parse_args(arguments)
    print(f"| model | {' | '.join(args.caches)} |\n|{'---|' * (1 + len(args.caches))}")
    for name, path in places(args.models):
        print(row(name, path, args), flush=True)


if __name__ == "__main__":
    main()
