"""Model classes that plugins bring: imported when a config.json of their family is met, since transformers does not know them."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from quark.errors import CheckpointError, PluginError, UnknownNameError
from quark.hf.json_files import read_json
from quark.plugins import templates
from quark.plugins.failures import leave_out

__all__ = ["known_to_transformers"]


@contextmanager
def known_to_transformers(file: Path) -> Iterator[None]:
    """While the body reads a config.json with transformers, the classes that a plugin brings for its model type are registered.

    They stay registered: importing them cannot be undone.

    Args:
        file: The config.json.

    Raises:
        PluginError: The module that the family's template names cannot be imported.
        CheckpointError: transformers knows no such model type; says which distribution does, or that none does.
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
    """What a config.json says; None where it says nothing that can be read, which its reader tells."""
    try:
        config = read_json(file)
    except CheckpointError:
        return None
    found = config.get("model_type") if isinstance(config, dict) else None
    return found if isinstance(found, str) else None


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
    """Why the model class is not there, with the cure."""
    try:
        module, source = templates().get(model_type).modeling, templates().source(model_type)
    except UnknownNameError:
        return "no installed distribution brings that family; install the one that does, or upgrade transformers"
    if module is None:
        return (
            f"the template of {source} names no module that brings the model class (TemplateRecord.modeling); upgrade that distribution, "
            "or transformers"
        )
    return (
        f"the module '{module}', which the template of {source} names for it, was imported and has not registered it with "
        f"AutoConfig.register; {leave_out(source)}"
    )
