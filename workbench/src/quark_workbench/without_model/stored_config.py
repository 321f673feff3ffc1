"""StoredConfig: the values of a checkpoint's config.json, for any model."""

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
    """The values of a config.json, as attributes, instead of a config of transformers.

    It looks nothing up and runs no code. `to_json_string` returns the values that were read, with the dtype,
    the tied head and the quantization of the result.

    Args:
        values: The values.
        directory: Their checkpoint.
    """

    def __init__(self, values: Mapping[str, Any], directory: str = "") -> None:
        self.__dict__["values"] = dict(values)
        self.__dict__["name_or_path"] = directory

    @classmethod
    def read(cls, directory: Path) -> StoredConfig:
        """Return the config of a checkpoint, without its quantization_config.

        Raises:
            CheckpointError: There is no config.json, or it is damaged.
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
        """Return the value of that key; raises AttributeError if there is none."""
        values = self.__dict__.get("values", {})
        if name == "_name_or_path":
            return self.__dict__.get("name_or_path", "")
        if name in values and not name.startswith("_"):
            return values[name]
        raise AttributeError(f"the config.json of the checkpoint has no '{name}'")

    def __setattr__(self, name: str, value: Any) -> None:
        """Set a value that an export changes; ignore all others, such as the class and the dtype."""
        if name == "name_or_path":
            self.__dict__[name] = value
        elif name in (_QUANTIZATION, "tie_word_embeddings"):
            self.values[name] = value

    @property
    def name(self) -> str:
        """The model type; if there is none, the name of the first class, or ``"unknown"``."""
        return str(self.values.get("model_type") or next(iter(self.values.get("architectures") or ()), "unknown"))

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype that the file names; None if it names none."""
        named = (part.get(key) for part in self._parts() for key in _DTYPE)
        dtype = next((getattr(torch, one.removeprefix("torch."), None) for one in named if isinstance(one, str)), None)
        return dtype if isinstance(dtype, torch.dtype) and dtype.is_floating_point else None

    def in_dtype(self, dtype: torch.dtype) -> StoredConfig:
        """Return the config of the checkpoint in another dtype."""
        name, config = str(dtype).removeprefix("torch."), StoredConfig(copy.deepcopy(self.values), self.name_or_path)
        named = [(part, key) for part in config._parts() for key in _DTYPE if key in part]
        for part, key in named or [(config.values, "dtype")]:
            part[key] = name
        return config

    def number(self, *keys: str) -> int | None:
        """Return the first whole number under one of the keys, of the config or of its text model."""
        numbers = (part.get(key) for part in self._parts() for key in keys)
        return next((n for n in numbers if isinstance(n, int) and not isinstance(n, bool)), None)

    def ties_head(self) -> bool | None:
        """Return whether the file ties the head to the embeddings; None if it does not say."""
        said = (part.get("tie_word_embeddings") for part in self._parts())
        return next((one for one in said if isinstance(one, bool)), None)

    def get_text_config(self) -> StoredConfig:
        """Return the config of the text model."""
        return StoredConfig([*self._parts()][-1])

    def to_json_string(self) -> str:
        """Return the content of the result's config.json."""
        return json.dumps(self.values, indent=2) + "\n"

    def to_json_file(self, path: str | Path) -> None:
        """Write the content of the result's config.json. Exporters recognize a config by this method."""
        Path(path).write_text(self.to_json_string(), encoding="utf-8", newline="\n")

    def _parts(self) -> Iterator[dict[str, Any]]:
        yield self.values
        yield from (part for key in _TEXT if isinstance(part := self.values.get(key), dict))
