"""Functions that read the transformers config of a checkpoint, and that import model classes of plugins."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from quark.base.lazy import imported
from quark.base.shortages import needs_libraries
from quark.base.version import refuse_unfit_environment
from quark.errors import CheckpointError, EnvironmentConflictError, PluginError, UnknownNameError, UnsupportedError
from quark.models.hf.custom_code import refuse_code
from quark.models.hf.internals import set_source
from quark.models.hf.json_files import config_file, read_json, reading
from quark.models.hf.model_class import model_class
from quark.plugins import templates
from quark.plugins.failures import leave_out

_PACKAGE_OF_ATTENTION = {
    "flash_attention_2": ("flash_attn", "flash-attn"),
    "flash_attention_3": ("flash_attn_interface", "FlashAttention 3"),
    "flash_attention_4": ("flash_attn", "FlashAttention 4"),
}
"""Dictionary from attention implementation to the module that it imports and the package that provides it."""
_NAMING_CODE = re.compile(r"_implementation(_internal)?$|^(backbone|architecture)$")
"""Those keys of a config.json whose value may name code on a hub or a model on a hub."""
_EXPERTS_OF_A_HUB = ("deepgemm", "sonicmoe")
"""Names of implementations of experts for which transformers fetches a kernel from a hub."""

_MOST_LAYERS = 10_000  # a model with more layers cannot be built in reasonable time


def model_config(path: Path, *, trust_remote_code: bool = False) -> Any:
    """Return the transformers config of a checkpoint.

    If a plugin provides the model class of this checkpoint, the class is imported first.

    Args:
        path: Directory of the checkpoint.
        trust_remote_code: Whether code that comes with the checkpoint is allowed to run.

    Raises:
        CheckpointError: The directory does not exist, its ``config.json`` is missing or damaged, or the model
            type is unknown.
        UnsupportedError: The model needs code from the checkpoint or a hub, and this code is not allowed to
            run.
        PluginError: The module of the plugin cannot be imported.
        EnvironmentConflictError: This version of transformers is not supported, or a library is broken.
    """
    refuse_unfit_environment()
    file = config_file(path)
    with needs_libraries(f"'{file}' cannot be read"):
        from transformers import CONFIG_MAPPING, AutoConfig

    values = read_json(file)
    _refuse_endless(values, file)
    if not trust_remote_code:
        _refuse_fetched_code(values, file)
    _refuse_missing_attention(values, file)
    model_type = values.get("model_type")
    if model_type is not None and not isinstance(model_type, str):
        raise CheckpointError(f"'{file}' is damaged, because its model_type is {model_type!r} instead of a name. Fetch the file again")
    if model_type is not None and model_type in templates():
        _import_modeling(model_type)
    if not trust_remote_code and model_type not in CONFIG_MAPPING:
        refuse_code(file)
    try:
        with reading(file, "its values do not fit a config of this release of transformers; correct them, or fetch the file again"):
            config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except CheckpointError as error:
        if model_type is None or model_type in CONFIG_MAPPING:
            raise
        unknown = f"'{file}' is of the model type '{model_type}', which transformers does not know"
        raise CheckpointError(f"{unknown}: {_why_unknown(model_type)}") from error
    classes = config.architectures
    if classes and not (isinstance(classes, list) and all(isinstance(name, str) for name in classes)):
        raise CheckpointError(
            f"'{file}' is damaged, because its architectures are {classes!r} instead of a list of names. Fetch the file again"
        )
    model_class(config, file, trust_remote_code=trust_remote_code)  # refuses an unknown class
    set_source(config, str(path))  # config.json could name any other directory, and quark copies files of this directory to a result
    return config


def _refuse_fetched_code(values: object, file: Path) -> None:
    """Raise an error if a config.json names code or a model that transformers would fetch from a hub.

    If the name of an attention or experts implementation has the form ``owner/name``, transformers fetches a
    kernel of this name. It also fetches kernels for some names of another form.

    Raises:
        UnsupportedError: The file names such code or such a model.
    """
    for key, value in _entries(values):
        if not _NAMING_CODE.search(key):
            continue
        for _, name in _entries([value]):
            if isinstance(name, str) and ("/" in name or name in _EXPERTS_OF_A_HUB):
                raise UnsupportedError(
                    f"'{file}' says {key} = '{name}', which is code or a model on a hub. Quark fetches it only if you allow it. Remove "
                    f'"{key}" from the file, or give --trust-remote-code (trust_remote_code=True)'
                )


def _refuse_missing_attention(values: object, file: Path) -> None:
    """Raise an error if a config.json names an attention implementation whose package is not installed.

    Raises:
        EnvironmentConflictError: The package is not installed.
    """
    for key, attention in _entries(values):
        name = attention.rpartition("|")[2] if isinstance(attention, str) else ""
        package = _PACKAGE_OF_ATTENTION.get(name)
        if package is not None and importlib.util.find_spec(package[0]) is None:
            raise EnvironmentConflictError(
                f"'{file}' asks for the attention '{name}', but {package[1]} is not installed. Install it, or remove \"{key}\" from "
                "the file, so that transformers chooses another attention"
            )


def _refuse_endless(values: object, file: Path) -> None:
    """Raise CheckpointError if a model that a config.json describes would take too long to build."""
    for key, value in _entries(values):
        if not isinstance(value, int) or value <= _MOST_LAYERS or re.search("size|dim", key):
            continue
        if re.search("layer|depth", key):
            raise CheckpointError(f"'{file}' says {key} = {value:,}, but no model has more than {_MOST_LAYERS:,}. Correct the file")
        if re.search("layer|expert|depth", key):
            stored = sum(weights.stat().st_size for weights in file.parent.glob("*.safetensors"))
            if 0 < stored < value:
                raise CheckpointError(f"'{file}' says {key} = {value:,}, but the weights have only {stored:,} bytes. Fetch both again")


def _entries(values: object) -> Iterator[tuple[str, object]]:
    """Yield all pairs of key and value in a JSON value, at any depth. The keys of a list are the indices as
    strings."""
    waiting = [values]
    while waiting:
        table = waiting.pop()
        for key, value in table.items() if isinstance(table, dict) else enumerate(table) if isinstance(table, list) else ():
            yield str(key), value
            waiting.append(value)


def _import_modeling(model_type: str) -> None:
    """Import the module that the template of a model type names in ``modeling``.

    The module defines the model class and registers it with transformers. The class stays registered, because
    an import cannot be undone.
    """
    module = templates().get(model_type).modeling
    if module is None:
        return
    try:
        imported(module)
    except Exception as error:
        source = templates().source(model_type)
        raise PluginError(
            f"'modeling' of the template '{model_type}' names the module '{module}', which cannot be imported "
            f"({type(error).__name__}: {error}). It comes from {source}: {leave_out(source)}"
        ) from error


def _why_unknown(model_type: str) -> str:
    """Return the reason why transformers does not know a model type, and a fix."""
    try:
        module, source = templates().get(model_type).modeling, templates().source(model_type)
    except UnknownNameError:
        return "no installed distribution provides this model family. Install a distribution that does, or upgrade transformers"
    if module is None:
        return (
            f"the template of {source} names no module with the model class (TemplateRecord.modeling). Upgrade that distribution, "
            "or transformers"
        )
    return (
        f"the template of {source} names the module '{module}', which does not register the model type with "
        f"AutoConfig.register; {leave_out(source)}"
    )
