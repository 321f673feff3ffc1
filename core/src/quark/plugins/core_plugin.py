"""The plugin of quark-core: layer types, sources of text, the listings.

Nothing heavy is imported.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from quark.plugins.hookspecs import hookimpl
from quark.plugins.kinds import KINDS
from quark.plugins.model_records import LayerTypeRecord
from quark.plugins.program_records import CommandRecord, DatasetRecord

__all__ = ["quark_register_commands", "quark_register_datasets", "quark_register_layer_types"]


@hookimpl
def quark_register_layer_types() -> Iterator[LayerTypeRecord]:
    """Yield the layer types of torch, and of transformers where it has a linear layer of its own."""
    yield _of_torch("linear", "Linear")
    yield LayerTypeRecord(
        name="transformers_conv1d",
        layer="transformers.pytorch_utils:Conv1D",
        quantized="quark.models.layers.quantized_layers:QuantConv1D",
        planned_as="linear",
        transposed=True,
        summary="the linear layer of GPT-2: x @ weight + bias",
    )
    # AMD Quark's global configuration reaches convolutions of two dimensions. Convolutions of one dimension
    # are depthwise in language models, where no runtime has quantized ones; in three dimensions they embed
    # patches.
    yield _of_torch("conv1d", "Conv1d", "convolutions", by_name=True)
    yield _of_torch("conv2d", "Conv2d", "convolutions")
    yield _of_torch("conv3d", "Conv3d", "convolutions", by_name=True)
    yield _of_torch("conv_transpose1d", "ConvTranspose1d", "convolutions", transposed=True, by_name=True)
    yield _of_torch("conv_transpose2d", "ConvTranspose2d", "convolutions", transposed=True)
    yield _of_torch("conv_transpose3d", "ConvTranspose3d", "convolutions", transposed=True, by_name=True)
    yield _of_torch("embedding", "Embedding", lookup=True)
    yield _of_torch("embedding_bag", "EmbeddingBag", lookup=True)
    yield LayerTypeRecord(
        name="attention_output",
        layer="torch.nn.modules.linear:NonDynamicallyQuantizableLinear",
        summary="stays float: nn.MultiheadAttention reads its weight and never calls it",
    )


@hookimpl
def quark_register_datasets() -> Iterator[DatasetRecord]:
    """Yield the sources of text: kinds of files, data sets of the Hugging Face Hub, known data sets."""
    yield _files("text", (".txt",), "plain text: one sample a file, or parts of it")
    yield _files("json_lines", (".jsonl", ".ndjson", ".json"), "JSON: an object with a text or a chat in each line, or a list of such")
    yield _files("parquet", (".parquet",), "Parquet tables with a column of texts or chats")
    yield _online("huggingface", "any data set of the package `datasets`: of the Hub, or a local directory")
    yield _online("pileval", "the Pile's validation data, as AWQ calibrates")
    yield _online("wikitext", "WikiText-2, one long text, as GPTQ calibrates")
    yield _online("cnn_dailymail", "news articles")
    yield _online("ultrachat", "chats, through the tokenizer's chat template")


@hookimpl
def quark_register_commands() -> Iterator[CommandRecord]:
    """Yield the commands that list installed things."""
    yield _listing("plugins", "List the installed plugins, plugins that failed, and names claimed twice.")
    for kind in KINDS:
        yield _listing(kind.plural, f"List the {kind.plural} of all plugins, or show one.")


def _listing(what: str, summary: str) -> CommandRecord:
    return CommandRecord(name=what, command=f"quark.cli.listing_commands:LISTINGS.{what}", summary=summary, group="Listings")


def _files(name: str, suffixes: tuple[str, ...], summary: str) -> DatasetRecord:
    module = "quark.calibration.data.files"
    return DatasetRecord(name=name, samples=f"{module}:{name}", example=f"{module}:write_{name}", suffixes=suffixes, summary=summary)


def _online(name: str, summary: str) -> DatasetRecord:
    return DatasetRecord(name=name, samples=f"quark.calibration.data.hub:{name}", is_online=True, summary=summary)


def _of_torch(name: str, layer: str, module: str = "quantized_layers", **facts: Any) -> LayerTypeRecord:
    quantized = f"quark.models.layers.{module}:Quant{layer}"
    return LayerTypeRecord(name=name, layer=f"torch.nn:{layer}", quantized=quantized, summary=f"torch.nn.{layer}", **facts)
