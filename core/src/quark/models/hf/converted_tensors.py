"""A checkpoint's tensors after weight converters.

Their names, shapes and dtypes from headers alone, their values when they are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from quark.base.log import get_logger
from quark.base.names import folded
from quark.errors import CheckpointError, ConfigError
from quark.models.hf.file_tensors import ReadTensor, TensorFiles
from quark.models.hf.weight_converters import Conversion, WeightConverter, find_conversions

__all__ = ["ConvertedTensors"]


class ConvertedTensors:
    """The tensors of a checkpoint, some of them converted.

    A converter is applied to stored tensors that the model has no place for, and to those whose name it
    keeps. Fused experts, say, of a model whose experts are fused too are read as they are stored: a plan
    takes them apart later.

    Args:
        files: The tensors that are converted.
        directory: Of the checkpoint, for messages.
        converters: Of the user, or of the model's template.
        has_place: Whether the model has a place for a tensor of that name.

    Attributes:
        meta: As of `quark.models.hf.file_tensors.TensorFiles`.

    Raises:
        CheckpointError: A converter's sources are incomplete, or the model has no place for what it makes.
        ConfigError: A converter does not fit the tensors, or two tensors would have one name.
    """

    def __init__(
        self, files: TensorFiles, directory: Path, converters: Sequence[WeightConverter], has_place: Callable[[str], bool]
    ) -> None:
        self._files = files
        stored = files.meta
        conversions = find_conversions(stored, converters)
        applied = [conversion for conversion in conversions if not _fits_as_stored(conversion, has_place)]
        converted = {name for conversion in applied for name in conversion.sources}
        self._conversion_of: dict[str, Conversion] = {}
        self.meta: dict[str, Tensor] = {name: tensor for name, tensor in stored.items() if name not in converted}
        for conversion in applied:
            for name, tensor in _shapes(conversion, stored, directory).items():
                if name in self.meta:
                    raise ConfigError(f"{conversion.converter} makes '{name}', which '{directory}' has already: leave the converter out")
                if not has_place(name):
                    raise CheckpointError(
                        f"{conversion.converter} makes '{name}' of {folded(conversion.sources)} in '{directory}', and the model of its "
                        "config.json has no such tensor: correct the target patterns"
                    )
                self.meta[name] = tensor
                self._conversion_of[name] = conversion
        _log_applied(converters, conversions, applied)

    def sources(self, name: str) -> list[str]:
        """Return the names, before conversion, of the tensors that make the tensor ``name``."""
        return self._conversion_of[name].sources if name in self._conversion_of else [name]

    @contextmanager
    def reading(self, device: torch.device) -> Iterator[ReadTensor]:
        """As `quark.models.hf.file_tensors.TensorFiles.reading`.

        Raises:
            CheckpointError: A file has changed or cannot be read.
        """
        with self._files.reading(device) as stored:
            converted: dict[str, Tensor] = {}  # results of conversions that have not been read yet

            def read(name: str, dtype: torch.dtype) -> Tensor:
                conversion = self._conversion_of.get(name)
                if conversion is None:
                    return stored(name, dtype)
                if name not in converted:
                    converted.update(conversion.make({source: stored(source, dtype) for source in conversion.sources}))
                return converted.pop(name)

            yield read


def _shapes(conversion: Conversion, stored: Mapping[str, Tensor], directory: Path) -> dict[str, Tensor]:
    """Return the results of a conversion of meta tensors; an error names converter and tensors."""
    try:
        return conversion.make(stored)
    except (RuntimeError, ValueError, IndexError, KeyError) as error:
        raise ConfigError(
            f"{conversion.converter} cannot convert {folded(conversion.sources)} of '{directory}' ({error}): correct its operations, or "
            "leave it out"
        ) from error


def _fits_as_stored(conversion: Conversion, has_place: Callable[[str], bool]) -> bool:
    names = conversion.sources
    return not set(names) & set(conversion.converter.names_kept(conversion.prefix)) and all(has_place(name) for name in names)


def _log_applied(converters: Sequence[WeightConverter], conversions: Sequence[Conversion], applied: Sequence[Conversion]) -> None:
    for converter in converters:
        if places := sum(conversion.converter is converter for conversion in applied):
            get_logger(__name__).info(f"{converter} is applied at {places} places of the checkpoint")
        else:
            has_matches = any(conversion.converter is converter for conversion in conversions)
            reason = "the model has a place for the tensors as they are stored" if has_matches else "no stored tensor has such a name"
            get_logger(__name__).info(f"{converter} is not applied: {reason}")
