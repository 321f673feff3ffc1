"""Functions that find the model class that a config.json names in ``architectures``.

All code that builds or loads a model uses these functions, because the Auto classes of transformers would
build another class of the model family if they do not know the named class.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
from torch import nn

from quark.base.shortages import needs_libraries
from quark.base.version import transformers_version
from quark.errors import UnsupportedError
from quark.models.hf.custom_code import refuse_code
from quark.models.hf.internals import model_classes

_FIRST = ("CausalLM", "ImageTextToText")
_FIRST_WITH_ENCODER = ("Seq2SeqLM", "SpeechSeq2Seq", *_FIRST)
"""Suffixes of the Auto classes that are tried, in this order, if a config names no class. ``AutoModel`` is
tried last.
"""


@attrs.frozen(eq=False)
class ModelClass:
    """The class of the model of a checkpoint, and the config with which the model is built.

    Attributes:
        type: A model class. If the model class is code of the checkpoint, this is an Auto class that runs the
            code.
        config: The config of the checkpoint, or the part of the config that belongs to this class.
        trust_remote_code: Whether code that comes with the checkpoint is allowed to run.
    """

    type: Any
    config: Any
    trust_remote_code: bool = False

    def build(self, **options: Any) -> Any:
        """Return a new model without the weights of the checkpoint.

        ``options`` are passed to ``from_config``.
        """
        if hasattr(self.type, "from_config"):
            return self.type.from_config(self.config, trust_remote_code=self.trust_remote_code, **options)
        return self.type._from_config(self.config, **options)

    def load(self, path: Path, **options: Any) -> Any:
        """Return the model in the directory ``path``, loaded with ``from_pretrained`` of the class."""
        return self.type.from_pretrained(
            path, config=self.config, trust_remote_code=self.trust_remote_code, local_files_only=True, **options
        )


def model_class(config: Any, file: Path, *, trust_remote_code: bool = False) -> ModelClass:
    """Return the class that a config names in ``architectures``.

    If the config names no class, return a class that transformers has for the config. A class for text is
    preferred, then a class for images and text, then the class of the model without a head.

    Args:
        config: A transformers config.
        file: The config.json from which the config was read. Messages name this file.
        trust_remote_code: Whether code that comes with the checkpoint is allowed to run.

    Raises:
        UnsupportedError: The class is unknown. Or it is code of the checkpoint, and this code is not allowed
            to run.
        EnvironmentConflictError: A library that the class needs cannot be imported.
    """
    names = list(config.architectures or ())
    own = getattr(config, "auto_map", None) or {}
    with needs_libraries(f"the model of '{file}' cannot be built"):
        if trust_remote_code and (auto := _of_own_code(own, names)) is not None:
            return ModelClass(auto, config, trust_remote_code=True)
        classes = (_named(name, config) for name in names) if names else _unnamed(config)
        for one in classes:
            if one is not None and (fitting := config_for(one, config)) is not None:
                return ModelClass(one, fitting, trust_remote_code)
    refuse_code(file)
    kind, version = type(config).model_type, transformers_version()
    if not names:
        raise UnsupportedError(
            f"'{file}' names no model class, and transformers {version} has no default class for the model type '{kind}'. Write the name "
            'of the class into "architectures"'
        )
    raise UnsupportedError(
        f"'{file}' names the model class {' or '.join(map(repr, names))}, which transformers {version} does not have for the model type "
        f"'{kind}'. Install a release or a plugin that has it, or correct \"architectures\"; in Python, you can build the model yourself "
        "and give it to ModelQuantizer or import_model_from_safetensors"
    )


def is_of_its_config(model: nn.Module) -> bool:
    """Return whether transformers would build a model of the same class from the config of ``model``."""
    from transformers import PretrainedConfig

    config = getattr(model, "config", None)
    if not isinstance(config, PretrainedConfig):
        return False
    return type(model) in {_named(name, config) for name in config.architectures or (type(model).__name__,)}


def config_for(model_type: Any, config: Any) -> Any:
    """Return the config that the class ``model_type`` accepts: ``config``, or a part of ``config``.

    Return None if the class accepts neither ``config`` nor one of its parts. Some model families use a model
    class of another family. The result is then ``config``, because transformers has registered the class for
    this type of config.
    """
    wanted = getattr(model_type, "config_class", None)
    if wanted is None or isinstance(config, wanted):
        return config
    for name in config.sub_configs:
        if isinstance(part := getattr(config, name, None), wanted):
            if (block := getattr(config, "quantization_config", None)) is not None:
                part.quantization_config = block
            return part
    return config if any(model_type in model_classes(auto, config) for auto in _auto_classes()) else None


def _of_own_code(auto_map: dict[str, Any], names: list[str]) -> Any:
    """Return the Auto class that ``auto_map`` maps to a class with one of ``names``.

    If ``names`` is empty, return the preferred Auto class in ``auto_map`` that builds models. Return None if
    there is no such Auto class.
    """
    import transformers

    keys = [key for key, reference in auto_map.items() if str(reference).rpartition(".")[2] in names or not names]
    autos = [getattr(transformers, key, None) for key in sorted(keys, key=lambda key: [key.endswith(end) for end in _FIRST], reverse=True)]
    return next((auto for auto in autos if hasattr(auto, "_model_mapping")), None)


def _named(name: str, config: Any) -> Any:
    """Return the model class ``name``, or None if there is no such class.

    A class that is registered for ``config`` takes precedence over a class in the package transformers.
    """
    import transformers

    registered = {one.__name__: one for auto in _auto_classes() for one in model_classes(auto, config)}
    one = registered.get(name) or getattr(transformers, name, None)
    return one if isinstance(one, type) and issubclass(one, nn.Module) else None


def _unnamed(config: Any) -> Iterator[Any]:
    """For a config that names no class, yield the model classes to try, the preferred class first."""
    autos = {auto.__name__: auto for auto in _auto_classes()}
    ends = _FIRST_WITH_ENCODER if getattr(config, "is_encoder_decoder", False) else _FIRST
    for name in (*(f"AutoModelFor{end}" for end in ends), "AutoModel"):
        yield from model_classes(autos[name], config)


def _auto_classes() -> list[Any]:
    """Return the Auto classes of transformers."""
    from transformers.models.auto import modeling_auto

    return [one for one in vars(modeling_auto).values() if isinstance(one, type) and getattr(one, "_model_mapping", None) is not None]
