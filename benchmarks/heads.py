"""Measure KL divergence and size of models with tied embeddings, which are float or quantized.

    python -m benchmarks.heads TEXT_DIR NAME=DIRECTORY [--windows 4] [--length 128]
                               [--out docs/data/heads.json]

Each row is a checkpoint, quantized from disk to disk in the model's own dtype and loaded in float32. Its KL
divergence from the float model is a mean with a standard error, over the windows of all texts of
`benchmarks.texts`. It has two sizes in bytes: of the stored tensors of the tied embeddings, and of all stored
tensors.
"""

from __future__ import annotations

import argparse
import json
import math
import operator
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.model_kinds import LanguageModel
from benchmarks.texts import PACKAGED, digest
from quark.base.log import silenced
from quark.base.version import VERSION
from quark.checkpoint.transformers_loading import load_checkpoint
from quark.config.layer import QLayerConfig
from quark.config.model import QConfig
from quark.models.hf.loading import load_model
from quark.models.hf.tokenizer import load_tokenizer
from quark.plugins import schemes
from quark.runs import quantize_checkpoint
from quark.torch import LLMTemplate
from quark_workbench.report.sizes import tensor_bytes

__all__ = ["ROWS", "main"]

Row = dict[str, Any]

ROWS = (
    *((None, head) for head in ("int8_wo_per_channel", "int8_wo_32", "uint4_wo_32", "int4_wo_32")),
    *(("int4_wo_64", head) for head in (None, "int8_wo_per_channel", "int4_wo_32")),
)
"""Scheme of the layers in the blocks, and scheme of the tied embeddings; None for float."""
TEXTS = (*PACKAGED, "code")


def configuration(model_type: str, body: str | None, head: str | None) -> QConfig:
    """Return the configuration of a row, with scheme ``head`` for the embeddings and ``body`` for the rest.

    All weights are rounded to nearest.
    """
    own = schemes().load_config(head)() if head else None
    tied = {} if own is None else {"lm_head": own, "*embed_tokens": own}
    if body is None:
        return QConfig(QLayerConfig(), layer_quant_config=tied)
    config = LLMTemplate.get(model_type).get_config(scheme=body, exclude_layers=[] if head else None)
    config.layer_quant_config = tied
    return config


def measured(source: Path, texts: Path, windows: int, length: int) -> Iterator[Row]:
    """Yield the rows of one model."""
    with silenced():
        reference = load_model(source, "float32")
    kind = LanguageModel(reference, source, load_tokenizer(source), texts)
    batches = [batch for text in TEXTS for batch in kind.batches(text, 1, windows, length)]
    for body, group in groupby(ROWS, key=operator.itemgetter(0)):  # the float model computes once for a group
        models, sizes = {}, {}
        for _, head in group:
            name = head or "float"
            with tempfile.TemporaryDirectory() as folder, silenced():
                out = Path(folder) / "out"
                quantize_checkpoint(source, out, configuration(reference.config.model_type, body, head))
                sizes[name] = tensor_bytes(out)
                models[name] = load_checkpoint(out, "float32")
            share_parameters(models[name], reference)
        values = kind.values(models, batches)
        for name, of_row in sizes.items():
            tied = sum(size for tensor, size in of_row.items() if tensor.startswith("lm_head") or ".embed_tokens." in tensor)
            kl, error = mean_and_error(values[name]["kl"])
            yield {
                "body": body or "float",
                "head": name,
                "kl": round(kl, 4),
                "error": round(error, 4),
                "tied_bytes": tied,
                "bytes": sum(of_row.values()),
            }


def share_parameters(model: nn.Module, reference: nn.Module) -> None:
    """Save memory: let ``model`` use those parameters of ``reference`` that equal its own."""
    own = dict(model.named_parameters())
    for name, parameter in reference.named_parameters():
        if name in own and torch.equal(own[name], parameter):
            own[name].data = parameter.data


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean of ``values``, and the standard error of the mean."""
    return statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure a model, print each row, and add the rows to a JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", type=Path)
    parser.add_argument("model", metavar="NAME=DIRECTORY")
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    name, _, directory = options.model.partition("=")
    rows = []
    for row in measured(Path(directory), options.texts, options.windows, options.length):
        print(name, *row.values(), flush=True)
        rows.append(row)
    if options.out is not None:
        data = json.loads(options.out.read_text(encoding="utf-8")) if options.out.exists() else {}
        digests = {text: digest(options.texts / f"{text}.txt") for text in TEXTS}
        data[name] = {"windows": options.windows, "length": options.length, "texts": digests, "quark": VERSION, "rows": rows}
        options.out.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
