"""Model classes of plugins, which transformers does not know: imported when a config.json has their model type."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from quark.errors import CheckpointError, PluginError, UnknownNameError
from quark.models.hf.json_files import read_json
from quark.plugins import templates
from quark.plugins.failures import leave_out

__all__ = ["known_to_transformers"]


@contextmanager
def known_to_transformers(file: Path) -> Iterator[None]:
    """Import the model classes of a plugin for the model type of a config.json, which the body reads with transformers.

    The classes stay registered with transformers: an import cannot be undone.

    Args:
        file: The config.json.

    Raises:
        PluginError: The module that the family's template names cannot be imported.
        CheckpointError: transformers does not know the model type; the message names the distribution with
            the template, if there is one.
    """
    model_type = _model_type(file)
    _import_modeling(model_type)
    try:
        yield
    except (CheckpointError, ValueError, KeyError) as error:
        from transformers import CONFIG_MAPPING

        if model_type is None or model_type in CONFIG_MAPPING:
            raise
        unknown = f"'{file}' is of the model type '{model_type}', which transformers does not know"
        raise CheckpointError(f"{unknown}: {_reason(model_type)}") from error


def _model_type(file: Path) -> str | None:
    """Return the ``model_type`` of a config.json; None where it cannot be read, which the body reports."""
    try:
        config = read_json(file)
    except CheckpointError:
        return None
    model_type = config.get("model_type") if isinstance(config, dict) else None
    return model_type if isinstance(model_type, str) else None


def _import_modeling(model_type: str | None) -> None:
    module = None if model_type is None else _modeling(model_type)
    if model_type is None or module is None:
        return
    try:
        importlib.import_module(module)
    except Exception as error:
        source = templates().source(model_type)
        raise PluginError(
            f"'modeling' of the template '{model_type}' names the module '{module}', which cannot be imported "
            f"({type(error).__name__}: {error}). It comes from {source}: {leave_out(source)}"
        ) from error


def _modeling(model_type: str) -> str | None:
    return templates().get(model_type).modeling if model_type in templates() else None


def _reason(model_type: str) -> str:
    """Return why there is no model class, with the fix."""
    try:
        module, source = templates().get(model_type).modeling, templates().source(model_type)
    except UnknownNameError:
        return "no installed distribution provides that family; install one that does, or upgrade transformers"
    if module is None:
        return (
            f"the template of {source} names no module with the model class (TemplateRecord.modeling); upgrade that distribution, "
            "or transformers"
        )
    return (
        f"the module '{module}', which the template of {source} names for it, was imported and has not registered it with "
        f"AutoConfig.register; {leave_out(source)}"
    )
