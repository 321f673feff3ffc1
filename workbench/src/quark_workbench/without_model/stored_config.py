"""StoredConfig, which has the values of a checkpoint's config.json, for models of any class."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from quark.errors import CheckpointError
from quark.models.hf.json_files import config_file, read_json

__all__ = ["StoredConfig"]

_QUANTIZATION = "quantization_config"
_TEXT = ("text_config", "llm_config", "language_config", "thinker_config")
"""Keys of the text model's config, if a config describes several models."""
_DTYPE = ("dtype", "torch_dtype")


class StoredConfig:
    """An object that takes the place of a transformers config.

    Its attributes are the values of a config.json. It needs no config class and runs no code.
    `to_json_string` returns the values that were read, in which the dtype, the tied head and the quantization
    are those of the result.

    Args:
        values: The values of the config.json.
        directory: Directory of the checkpoint.
    """

    def __init__(self, values: Mapping[str, Any], directory: str = "") -> None:
        self.__dict__["values"] = dict(values)
        self.__dict__["name_or_path"] = directory

    @classmethod
    def read(cls, directory: Path) -> StoredConfig:
        """Return the config of a checkpoint, without its quantization_config.

        Raises:
            CheckpointError: The checkpoint has no config.json, or the file is damaged.
        """
        file = config_file(directory)
        values = read_json(file)
        kind, classes = values.get("model_type"), values.get("architectures")
        if kind is not None and not isinstance(kind, str):
            raise CheckpointError(f"'{file}' has model_type = {kind!r}, which is not a name. The file is damaged: fetch it again")
        if classes is not None and not (isinstance(classes, list) and all(isinstance(name, str) for name in classes)):
            raise CheckpointError(
                f"'{file}' has architectures = {classes!r}, which is not a list of names. The file is damaged: fetch it again"
            )
        values.pop(_QUANTIZATION, None)
        for key in _TEXT:
            if isinstance(values.get(key), dict):
                values[key].pop(_QUANTIZATION, None)
        return cls(values, str(directory))

    def __getattr__(self, name: str) -> Any:
        """Return the value of the key ``name``. Raise AttributeError if there is no such key."""
        values = self.__dict__.get("values", {})
        if name == "_name_or_path":
            return self.__dict__.get("name_or_path", "")
        if name in values and not name.startswith("_"):
            return values[name]
        raise AttributeError(f"the config.json of the checkpoint has no '{name}'")

    def __setattr__(self, name: str, value: Any) -> None:
        """Set a value that an export may change: the quantization, the tied head, or the path.

        Other changes, such as of the class or the dtype, are ignored.
        """
        if name == "name_or_path":
            self.__dict__[name] = value
        elif name in (_QUANTIZATION, "tie_word_embeddings"):
            self.values[name] = value

    @property
    def name(self) -> str:
        """The model type, or else the name of the first class, or else ``"unknown"``."""
        return str(self.values.get("model_type") or next(iter(self.values.get("architectures") or ()), "unknown"))

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype that the config.json names, or None if the file names no dtype."""
        named = (part.get(key) for part in self._parts() for key in _DTYPE)
        dtype = next((getattr(torch, one.removeprefix("torch."), None) for one in named if isinstance(one, str)), None)
        return dtype if isinstance(dtype, torch.dtype) and dtype.is_floating_point else None

    def in_dtype(self, dtype: torch.dtype) -> StoredConfig:
        """Return a copy of the config that names another dtype."""
        name, config = str(dtype).removeprefix("torch."), StoredConfig(copy.deepcopy(self.values), self.name_or_path)
        named = [(part, key) for part in config._parts() for key in _DTYPE if key in part]
        for part, key in named or [(config.values, "dtype")]:
            part[key] = name
        return config

    def number(self, *keys: str) -> int | None:
        """Return the first integer that the config, or else its text config, has under one of ``keys``.

        Return None if there is no such integer.
        """
        numbers = (part.get(key) for part in self._parts() for key in keys)
        return next((n for n in numbers if isinstance(n, int) and not isinstance(n, bool)), None)

    def ties_head(self) -> bool | None:
        """Return whether the config.json ties the head to the embeddings, or None if it does not say."""
        said = (part.get("tie_word_embeddings") for part in self._parts())
        return next((one for one in said if isinstance(one, bool)), None)

    def get_text_config(self) -> StoredConfig:
        """Return the config of the text model, or the whole config if it has no separate text config."""
        return StoredConfig([*self._parts()][-1])

    def to_json_string(self) -> str:
        """Return the content of the result's config.json."""
        return json.dumps(self.values, indent=2) + "\n"

    def to_json_file(self, path: str | Path) -> None:
        """Write the result's config.json. Exporters treat an object with this method as a config."""
        Path(path).write_text(self.to_json_string(), encoding="utf-8", newline="\n")

    def _parts(self) -> Iterator[dict[str, Any]]:
        yield self.values
        yield from (part for key in _TEXT if isinstance(part := self.values.get(key), dict))
