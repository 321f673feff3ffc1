"""`GgufExporter` writes a model to one GGUF file."""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import attrs
import torch
from torch import nn

from quark.base.log import get_logger
from quark.checkpoint import BlockStream, CheckpointContent, Exporter, ExportOptions, save_companions
from quark.checkpoint.model_tensors import Region, warn_of_left_out
from quark.errors import ConfigError, MissingPluginError, UnsupportedError
from quark.models.plan.decoder_blocks import Block, decoder_blocks
from quark.plugins import OptionNote
from quark_exporters.gguf_layout.metadata import family_of, write_metadata
from quark_exporters.gguf_layout.tensors import FLOAT_TYPES, GgufTensor, TensorWriter
from quark_exporters.gguf_layout.vocabulary import write_vocabulary

if TYPE_CHECKING:
    from gguf import GGUFWriter

__all__ = ["FILE", "GgufExporter"]

FILE = "model.gguf"
"""The default name of the exported file."""


class GgufExporter(Exporter):
    """Writes a GGUF file with the codes of the model, as Q4_0, Q4_1, Q8_0 or MXFP4 weights.

    All other tensors are stored in floating point.

    The codes do not change. The scales of Q4_0, Q4_1 and Q8_0 are rounded to float16, as these types require.
    Source: the GGUF specification, version 3.

    Args:
        float_type: Type of the matrices that are not quantized: "f32", "f16" or "bf16". With "auto", each
            matrix keeps its type.
        tokenizer_pre: llama.cpp's name for the way in which the tokenizer splits text before it merges
            tokens. If the name is empty, the exporter detects the name.
        file_name: Name of the exported file.
    """

    streams = True

    def __init__(
        self,
        float_type: str = "auto",
        tokenizer_pre: Annotated[str, OptionNote(examples=("llama-bpe", "qwen2"))] = "",
        file_name: str = FILE,
    ) -> None:
        if float_type not in ("auto", *FLOAT_TYPES):
            raise ConfigError(f"float_type is {float_type!r}, which is not supported. Use one of auto, {', '.join(FLOAT_TYPES)}")
        if Path(file_name).name != file_name or Path(file_name).suffix != ".gguf":
            raise ConfigError(
                f"file_name is {file_name!r}, which is not valid. Use a name without directories that ends in .gguf, such as '{FILE}'"
            )
        self._file_name = file_name
        self._float_type = float_type
        self._tokenizer_pre = tokenizer_pre

    def export(self, content: CheckpointContent, out: Path, options: ExportOptions) -> None:
        """Write the GGUF file, as `quark.checkpoint.Exporter.export` describes."""
        with self.stream(content, content.model, out, options) as stream:
            for block in decoder_blocks(content.model, content.plan.architecture):
                stream.write(block)
            stream.write(None)
            stream.finish(content)

    def check(self, content: CheckpointContent, skeleton: nn.Module, options: ExportOptions) -> None:
        """Raise an error if GGUF cannot store the model (see `quark.checkpoint.Exporter.check`)."""
        tensors = self._tensors(content, options)
        _refuse_algorithms(content)
        tensors.refuse_codes_without_a_type(skeleton)

    def _tensors(self, content: CheckpointContent, options: ExportOptions) -> TensorWriter:
        gguf, config = _gguf(), _text_config(content.model)
        family = family_of(config)
        architecture = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == family.architecture)
        names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
        return TensorWriter(family, config, names, options.weight_format == "real_quantized", self._float_type)

    @contextmanager
    def stream(self, content: CheckpointContent, skeleton: nn.Module, out: Path, options: ExportOptions) -> Iterator[BlockStream]:
        """Return a stream that writes the file block by block (see `quark.checkpoint.Exporter.stream`)."""
        gguf = _gguf()
        self.check(content, skeleton, options)
        _warn_of_activations(content)
        warn_of_left_out(content, "GGUF")
        tensors = self._tensors(content, options)
        config, family = tensors.config, tensors.family
        regions = _regions(content)
        announced = [tensor for region in regions for tensor in tensors.tensors(skeleton, region)]
        writer = gguf.GGUFWriter(None, family.architecture)
        write_metadata(writer, config, family, content.config, _file_type(announced))
        with TemporaryDirectory(prefix="quark-gguf-") as directory:
            save_companions(content.model, Path(directory), options.tokenizer)
            write_vocabulary(writer, Path(directory), config.vocab_size, self._tokenizer_pre or None)
        _announce(writer, announced)
        writer.write_header_to_file(out / self._file_name)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        try:
            yield _Stream(content.model, tensors, iter(regions), writer)
        finally:
            writer.close()


@attrs.frozen(eq=False)
class _Stream(BlockStream):
    """Writes the tensors of a GGUF file, one part of the model at a time.

    The header of the file is already written.
    """

    model: nn.Module
    tensors: TensorWriter
    regions: Iterator[Region]
    writer: GGUFWriter

    def write(self, block: Block | None) -> None:
        """Write the tensors of the next part of the model (see `quark.checkpoint.BlockStream.write`)."""
        if (region := next(self.regions, None)) is None:
            return  # no region is left, because the whole model is one block
        for tensor in self.tensors.tensors(self.model, region):
            values = tensor.make().cpu().contiguous()
            self.writer.write_tensor_data(values.view(torch.uint8).numpy())
            for file in self.writer.fout or ():  # numpy raises no error if a small tensor does not fit on the disk
                file.flush()
                if os.fstat(file.fileno()).st_size < file.tell():
                    raise OSError(
                        errno.ENOSPC, f"the tensor '{tensor.name}' could not be written completely. Check the free disk space", file.name
                    )

    def finish(self, content: CheckpointContent) -> None:
        """Do nothing, because all tensors are already written (see `quark.checkpoint.BlockStream.finish`)."""


def _gguf() -> Any:
    try:
        import gguf
    except ImportError as error:
        raise MissingPluginError(
            "the GGUF exporter needs the package gguf. Install it with: pip install 'quark-exporters[gguf]'"
        ) from error
    return gguf


def _text_config(model: Any) -> Any:
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "get_text_config"):
        raise UnsupportedError(f"the GGUF exporter needs a transformers model, not a {type(model).__name__}. Use another exporter")
    return config.get_text_config()


def _regions(content: CheckpointContent) -> list[Region]:
    """Return the parts of the model in the order in which their tensors are written.

    The decoder blocks come first, and the tensors outside the blocks come last.
    """
    names = tuple(block.name for block in decoder_blocks(content.model, content.plan.architecture))
    return [Region()] if names == ("",) else [*map(Region, names), Region(without=names)]


def _refuse_algorithms(content: CheckpointContent) -> None:
    if names := content.config.run_time_algorithms:
        raise UnsupportedError(
            f"the algorithm {', '.join(names)} runs with this model, but llama.cpp does not support it. Leave the algorithm out, or export "
            f"as safetensors"
        )


def _warn_of_activations(content: CheckpointContent) -> None:
    layers = [row.config for row in content.plan.quantized if row.config is not None]
    if any(layer.input_tensors is not None or layer.output_tensors is not None for layer in layers) or content.plan.attentions:
        get_logger(__name__).warning(
            "GGUF stores only weights, so the file does not say how activations and the KV cache of this model are quantized. llama.cpp "
            "rounds them in its own way."
        )


def _file_type(tensors: list[GgufTensor]) -> int:
    """Return the `gguf.LlamaFileType` that describes most of the quantized weights.

    If no weight is quantized, return the type that describes most of the float weights.
    """
    from gguf import LlamaFileType

    sizes: Counter[str] = Counter()
    for tensor in tensors:
        if len(tensor.shape) > 1:
            sizes[tensor.block.file_type if tensor.block else {"F32": "ALL_F32"}.get(tensor.kind, f"MOSTLY_{tensor.kind}")] += torch.Size(
                tensor.shape
            ).numel()
    quantized = [name for name in sizes if name not in ("ALL_F32", "MOSTLY_F16", "MOSTLY_BF16")]
    return int(LlamaFileType[max(quantized or sizes, key=lambda name: sizes[name])])


def _announce(writer: GGUFWriter, tensors: list[GgufTensor]) -> None:
    import numpy
    from gguf import GGMLQuantizationType

    for tensor in tensors:
        writer.add_tensor_info(
            tensor.name, tensor.shape, numpy.dtype(numpy.float32), tensor.nbytes, raw_dtype=GGMLQuantizationType[tensor.kind]
        )
