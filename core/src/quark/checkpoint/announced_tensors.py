"""Functions that check whether a checkpoint contains exactly the tensors that it announces.

The ``quantization_config`` of a checkpoint announces tensors. The functions read only the headers of the
files.

Every reader either calls these functions or puts tensors into the model one by one with
`quark.checkpoint.reader.place`. In both cases, `quark.models.hf.missing_tensors.misfit` compares each stored
tensor with the tensor that the model needs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from quark.base.log import silenced
from quark.checkpoint.layout_reader import LayoutReader, ReadsOwnFiles, reader_of
from quark.checkpoint.reader import place, placed_by, prepared, read_configuration
from quark.config.model import QConfig
from quark.errors import CheckpointError, UnsupportedError
from quark.models.hf.json_files import config_file, read_json
from quark.models.hf.missing_tensors import beside_others, left_out_by, misfit, recomputed_by, refuse_unannounced
from quark.models.hf.shards import DTYPES, Shard, check_shards
from quark.models.hf.skeleton import empty_model
from quark.plugins import exporters


def place_headers(
    model: nn.Module, place_of: Callable[[str, Tensor], str], shards: Iterable[Shard], exclude: Collection[str]
) -> tuple[set[str], list[str]]:
    """Put a meta tensor for each stored tensor into a prepared model.

    Return the paths of these tensors in the model, and an error message for each stored tensor that does not
    fit the model.
    """
    found: set[str] = set()
    errors = []
    for path, name, kind in _stored(shards, left_out_by(model, exclude)):
        try:
            tensor = _meta(path, name, *kind)
            found.add(place(model, place_of(name, tensor), name, tensor, path))
        except CheckpointError as error:
            errors.append(str(error))
    return found, errors


def refuse_misfits(model: nn.Module, reader: LayoutReader, config: QConfig, directory: Path) -> None:
    """Check that stored tensors fit a prepared model, without changing the model.

    Another loader will put the tensors into the model. The other loader renames and leaves out tensors by
    its own rules. So this function ignores tensors of modules that the model lacks. The other loader reports
    missing tensors itself.

    Raises:
        CheckpointError: The shape or dtype of a tensor differs from what the model needs. Or a tensor has the
            name of a layer of the model, but the layer has no such tensor.
    """
    state, place_of = model.state_dict(keep_vars=True), placed_by(reader, model, config)
    is_beside, prefix = beside_others(model), f"{getattr(model, 'base_model_prefix', '')}."
    is_recomputed = recomputed_by(model)
    unannounced = []
    for path, name, kind in _stored(check_shards(directory), left_out_by(model, config.exclude)):
        tensor = _meta(path, name, *kind)
        for known in dict.fromkeys((name, name.removeprefix(prefix), f"{prefix}{name}")):
            target = place_of(known, tensor)
            if target in state:
                if error := misfit(tensor, state[target]):
                    raise CheckpointError(f"'{name}' in '{path}' {error}: the export is damaged, or it belongs to another model")
                break
            if (is_beside(known) or is_beside(target)) and not is_recomputed(known):
                unannounced.append(name)
                break
    refuse_unannounced(unannounced, directory)


def refuse_misfits_of(directory: Path, *, trust_remote_code: bool = False) -> None:
    """Call `refuse_misfits` with the model that ``config.json`` of a checkpoint describes.

    If none of quark's readers supports the checkpoint, do nothing.

    Raises:
        CheckpointError: Tensors do not fit the model, or the ``quantization_config`` cannot be used.
    """
    file = config_file(directory)
    block = read_json(file).get("quantization_config")
    layout = exporters().fitting_one(block, "reader", file) if isinstance(block, dict) else None
    if not isinstance(block, dict) or layout is None or isinstance(reader := reader_of(layout), ReadsOwnFiles):
        return
    try:
        with silenced():
            stored = read_configuration(reader, block, directory)
            with torch.device("meta"):
                model = empty_model(directory, None, trust_remote_code=trust_remote_code)
            prepared(reader, model, stored, directory)
    except UnsupportedError:
        return
    refuse_misfits(model, reader, stored.config, directory)


def _stored(shards: Iterable[Shard], is_left_out: Callable[[str], bool]) -> Iterator[tuple[Path, str, tuple[str, tuple[int, ...]]]]:
    """Yield, for each stored tensor that is not left out, its file, its name, and its dtype and shape."""
    return ((shard.path, name, kind) for shard in shards for name, kind in shard.tensors.items() if not is_left_out(name))


def _meta(path: Path, name: str, dtype: str, shape: tuple[int, ...]) -> Tensor:
    """Return a meta tensor for a stored tensor. Raise CheckpointError if quark cannot read the dtype."""
    if dtype not in DTYPES:
        raise CheckpointError(f"'{name}' in '{path}' has the dtype {dtype}, which quark cannot read. Make or fetch the export again")
    return torch.empty(shape, dtype=DTYPES[dtype], device="meta")
