"""Compare the KL divergence of quark-vq's codebooks and of integers that have at least as many bits.

    python -m benchmarks.vector_quantization TEXT_DIR MODEL… [--bits 2,3] [--algorithms none,gptq]
                                             [--evaluate foldoc,devil,code,german] [--windows 4]
                                             [--length 512] [--calibrate foldoc]
                                             [--calibration-windows 16] [--blocks 6]
                                             [--out docs/data/vector_quantization.json]

The schemes are ``vq2`` and ``vq3_g64``. The integers are asymmetric, in groups of 64, with bfloat16 scales;
they need at least as many bits per weight as the codebooks. The bits include all tensors that a checkpoint
stores for the quantized weights: codes, scales, zero points and codebooks. The texts come from
`benchmarks.texts`. Calibration uses the first half of a text. Evaluation uses the second half of each text of
``--evaluate``. The standard error of a difference is computed from pairs of values for the same sequence. If
whole models take too long, ``--blocks`` quantizes only the first decoder blocks.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.defaults import first_blocks, places
from benchmarks.model_kinds import kind_of
from benchmarks.paired import difference, log_ratio
from benchmarks.texts import digest
from quark.base.log import silenced
from quark.base.version import VERSION
from quark.config.layer import QLayerConfig
from quark.config.tensor import QTensorConfig
from quark.models.hf.loading import load_model
from quark.models.hf.tokenizer import load_tokenizer
from quark.models.layers import QuantizedLayer
from quark.plugins import schemes
from quark.torch import LLMTemplate, ModelQuantizer

GROUP = 64
"""Number of columns of an integer weight that share a scale and a zero point."""
CODEBOOKS = {"2": "vq2", "3": "vq3_g64"}
"""Scheme for each number of bits."""


def weights(scheme: str) -> QLayerConfig:
    """Return the configuration of ``scheme``, which is a value of `CODEBOOKS`, ``"int2"`` or ``"int3"``."""
    if scheme in CODEBOOKS.values():
        config: QLayerConfig = schemes().load_config(scheme)()
        return config
    spec = QTensorConfig(
        dtype={"int2": "uint2", "int3": "int3"}[scheme],
        qscheme="per_group",
        ch_axis=-1,
        group_size=GROUP,
        symmetric=False,
        is_dynamic=False,
        observer_cls="PerGroupMinMaxObserver",
        round_method="half_even",
        scale_type="bfloat16",
    )
    return QLayerConfig(weight=spec)


def stored_bits(model: nn.Module) -> float:
    """Return the mean number of bits that a checkpoint stores for a quantized weight."""
    stored = elements = 0
    for layer in model.modules():
        if isinstance(layer, QuantizedLayer) and layer.weight_quantizer is not None:
            quantizer, shape = layer.weight_quantizer.quantizer, tuple(layer.weight.shape)  # type: ignore[union-attr, arg-type]
            stored += 8 * sum(tensor.nbytes for tensor in quantizer.pack(*quantizer.empty_codes(shape)).values())
            elements += torch.Size(shape).numel()
    return stored / elements


def measured(args: argparse.Namespace, name: str, path: Path) -> Iterator[list[dict[str, Any]]]:
    """Yield a list of cells for each number of bits; all cells are of one model.

    A list has two cells for each algorithm: first with codebooks, then with integers.
    """
    reference = load_model(path, "float32")
    kind = kind_of(reference)(reference, path, load_tokenizer(path), args.text)
    data = kind.calibration(args.calibrate, args.calibration_windows, args.length)
    for bits in args.bits:
        models, cells = {}, []
        for algorithm in args.algorithms:
            for scheme in (CODEBOOKS[bits], f"int{bits}"):
                config = LLMTemplate.get(reference.config.model_type).get_config(
                    scheme="int4_wo_64", algorithm=None if algorithm == "none" else [algorithm]
                )
                config.global_quant_config = weights(scheme)
                model: Any = load_model(path, "float32")
                with first_blocks(model, args.blocks):
                    model = models[f"{scheme} {algorithm}"] = ModelQuantizer(config).quantize_model(model, data)
                cells.append({"model": name, "scheme": scheme, "algorithm": algorithm, "bits": round(stored_bits(model), 4)})
        for text in args.evaluate:
            values = kind.values(models, kind.batches(text, 1, args.windows, args.length))
            for cell, of_model in zip(cells, models, strict=True):
                cell[text] = values[of_model]["kl"]
        yield cells


def compared(vector: dict[str, Any], scalar: dict[str, Any], texts: Sequence[str]) -> str:
    """Return the line that compares the cell of codebooks ``vector`` with the cell of integers ``scalar``.

    The line has the bits, and the KL divergence over all texts.
    """
    one, other = ([value for text in texts for value in cell[text]] for cell in (scalar, vector))
    change, ratio = difference(one, other), log_ratio(zip(range(len(one)), one, other, strict=True))
    mean = sum(one) / len(one)
    values = f"KL {mean:.3f} → {mean + change.mean:.3f} ({change.mean:+.3f} ± {change.error or 0:.3f}"
    sizes = f"{scalar['bits']:.3f} → {vector['bits']:.3f} bits"
    where = f"{vector['model']} {vector['algorithm']} {scalar['scheme']} → {vector['scheme']}"
    return f"{where:32} {sizes}  {values}; ln {ratio.mean:+.3f} ± {ratio.error or 0:.3f})  {change.verdict}"


def main(arguments: list[str] | None = None) -> None:
    """Measure the models, print a line for each pair of cells, and write the cells to a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("models", nargs="+", metavar="MODEL")
    for option, default in (("bits", "2,3"), ("algorithms", "none,gptq"), ("evaluate", "foldoc,devil,code,german")):
        parser.add_argument(f"--{option}", default=default.split(","), type=lambda text: text.split(","))
    parser.add_argument("--calibrate", default="foldoc")
    for option, number in (("windows", 4), ("length", 512), ("calibration-windows", 16)):
        parser.add_argument(f"--{option}", type=int, default=number)
    parser.add_argument("--blocks", type=int, help="number of decoder blocks to quantize; default: all")
    parser.add_argument("--out", type=Path, help="file of results, which is overwritten")
    args = parser.parse_args(arguments)
    cells: list[dict[str, Any]] = []
    for name, path in places(args.models):
        for found in measured(args, name, path):
            cells += found
            for vector, scalar in zip(found[::2], found[1::2], strict=True):
                print(compared(vector, scalar, args.evaluate), flush=True)
            if args.out:
                settings = {key: getattr(args, key) for key in ("calibrate", "windows", "length", "calibration_windows", "blocks")}
                texts = {text: digest(args.text / f"{text}.txt") for text in args.evaluate}
                versions = {"quark": VERSION, "torch": str(torch.__version__)}
                result = {"versions": versions, "settings": settings, "texts": texts, "cells": cells}
                args.out.write_text(json.dumps(result, separators=(",", ":")).replace('{"model"', '\n{"model"') + "\n", encoding="utf-8")


if __name__ == "__main__":
    with silenced():
        main()
