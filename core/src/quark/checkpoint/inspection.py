"""Functions that check whether a checkpoint is complete, and which runtimes would load it.

They do not start a runtime.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import attrs
import torch
from torch import Tensor, nn

from quark.base.log import silenced
from quark.base.names import folded
from quark.checkpoint.announced_tensors import place_headers
from quark.checkpoint.layout_reader import ReadsOwnFiles, layout_for, quantization_block, reader_of
from quark.checkpoint.reader import fill_zero_points, placed_by, prepared, tie
from quark.checkpoint.run_file import verify as verified
from quark.config.model import QConfig
from quark.errors import PluginError, QuarkError
from quark.models.hf.file_tensors import FileTensors
from quark.models.hf.internals import output_embeddings
from quark.models.hf.json_files import naming
from quark.models.hf.missing_tensors import without_source
from quark.models.hf.model_class import is_of_its_config
from quark.models.hf.shards import Shard, check_shards
from quark.models.hf.skeleton import empty_model
from quark.models.plan.quant_plan import QuantPlan
from quark.plugins import exporters
from quark.plugins.attribution import attributed, origin


@attrs.frozen
class RuntimeSupport:
    """The support of one runtime for a checkpoint.

    Attributes:
        runtime: Name of the runtime.
        summary: A short description of the runtime.
        methods: A dictionary from the name of a quantization method in the runtime to a text with the names
            of the layers that would use this method.
        refusals: Reasons why the runtime would not load the checkpoint, or would compute other results than
            the exported model. Empty if the runtime loads the checkpoint and computes the same results.
        notes: Further remarks.
        own_layers: Names of the layers that the runtime's own kernels would compute. The names are listed
            even if the runtime refuses the checkpoint because of other layers.
    """

    runtime: str
    summary: str
    methods: Mapping[str, str]
    refusals: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    own_layers: frozenset[str] = attrs.field(default=frozenset(), repr=False)

    @property
    def loads(self) -> bool:
        """Whether the runtime would load the checkpoint and compute the results of the exported model."""
        return not self.refusals


@attrs.frozen(eq=False)
class CheckpointFacts:
    """The facts about a checkpoint that an `Inspector` gets. They were collected without reading weights.

    Attributes:
        directory: The checkpoint.
        layout: Name of the layout of the checkpoint.
        block: The ``quantization_config`` of the checkpoint.
        config: The configuration that the reader of the layout has parsed from ``block``.
        plan: The quantization of each layer of the model.
        heads: Full names of the output heads.
    """

    directory: Path
    layout: str
    block: Mapping[str, Any]
    config: QConfig
    plan: QuantPlan
    heads: frozenset[str]

    def number(self, name: str) -> float | None:
        """Return the value of the stored tensor ``name``.

        Return None if there is no such tensor, or if the tensor does not have exactly one element.
        """
        files = FileTensors(check_shards(self.directory))
        if name not in files.meta or files.meta[name].numel() != 1:
            return None
        with files.reading(torch.device("cpu")) as read:
            return float(read(name, torch.float32).float())


class Inspector(Protocol):
    """The protocol of objects that say which runtimes support a checkpoint in one layout.

    A plugin names such a class as ``inspector`` of an `ExporterRecord`.
    """

    def support(self, facts: CheckpointFacts) -> Iterable[RuntimeSupport]:
        """Yield a `RuntimeSupport` for each runtime."""


@attrs.frozen
class Inspection:
    """The result of the inspection of a checkpoint.

    Attributes:
        layout: Name of the layout of the checkpoint.
        damage: Messages about parts of the checkpoint that are missing, do not fit the model, or have changed
            since they were written. Empty if the checkpoint is complete and unchanged.
        runtimes: A `RuntimeSupport` for each runtime. Empty if the checkpoint is damaged, or if the layout of
            the checkpoint has no inspector.
        verified: Number of tensors that were compared with their checksums.
    """

    layout: str
    damage: tuple[str, ...] = ()
    runtimes: tuple[RuntimeSupport, ...] = ()
    verified: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Return the inspection in JSON form."""
        known = attrs.filters.exclude("own_layers")
        runtimes = [attrs.asdict(support, filter=known) | {"loads": support.loads} for support in self.runtimes]
        return {"layout": self.layout, "damage": list(self.damage), "runtimes": runtimes, "verified": self.verified}


@attributed("inspecting a checkpoint")
def inspect_checkpoint(
    directory: str | Path, *, trust_remote_code: bool = False, verify: bool = False, build: Callable[[Path], nn.Module] | None = None
) -> Inspection:
    """Return an `Inspection`, which says whether a checkpoint is damaged and which runtimes support it.

    The function reads scales. It reads weights only if ``verify`` is True.

    Args:
        directory: A quantized checkpoint in a layout that an installed plugin reads.
        trust_remote_code: Whether code that comes with the checkpoint is allowed to run.
        verify: Whether to compare all bytes with the checksums that were computed when the checkpoint was
            written (`quark.checkpoint.run_file.verify`). If bytes have changed, nothing else is inspected.
        build: A function that builds the float model for a directory. If None, the class that
            ``config.json`` names is built.

    Raises:
        CheckpointError: ``directory`` is not a quantized checkpoint, or no installed layout reads it. Or
            ``verify`` is True, but the checkpoint has no checksums.
        UnsupportedError: The reader of the layout does not support a part of the checkpoint.
    """
    path = Path(directory)
    tensors = 0
    if verify:
        comparison = verified(path)
        if comparison.changes:
            return Inspection("", comparison.changes)
        tensors = comparison.tensors
    block = quantization_block(path)
    layout = layout_for(block, path / "config.json")
    reader, shards = reader_of(layout), check_shards(path)
    with naming(path / "config.json"):
        stored = reader.configuration(block, path)
    model: Any = empty_model(path, None, trust_remote_code=trust_remote_code) if build is None else build(path)
    plan = prepared(reader, model, stored, path, origin("exporters", layout))
    heads = {name for name, module in model.named_modules() if module is output_embeddings(model)} or {"lm_head"}
    misfits, missing = _placed(model, placed_by(reader, model, stored.config), shards, stored.config.exclude)
    lacks = [f"'{path}' lacks {len(missing)} tensor(s): {folded(missing)}"] if missing else []
    damage = (*misfits, *lacks, *_bad_scales(shards))
    if damage or exporters().get(layout).inspector is None:
        return Inspection(layout, damage, verified=tensors)
    with attributed("inspecting a checkpoint", origin("exporters", layout)):
        facts = CheckpointFacts(path, layout, block, stored.config, plan, frozenset(heads))
        runtimes = tuple(exporters().load_inspector(layout)().support(facts))
    return Inspection(layout, (), runtimes, tensors)


@torch.no_grad()
def refuse_incomplete_export(exporter: str, directory: Path, model: nn.Module) -> None:
    """Check that an export has all tensors that the reader of its layout needs.

    The function reads only the headers of files. Except in strict mode, the check is skipped for the
    exporters of this project (`quark.plugins.attribution.Origin.is_checked_whole`). It is also skipped if
    the layout has no reader, if the reader is a `ReadsOwnFiles` or refuses this export, or if transformers
    would not build the model from the ``config.json`` of the export.

    Args:
        exporter: Name of the exporter.
        directory: The directory that the exporter has written.
        model: The model that the exporter has written. Its tensors may be on the meta device.

    Raises:
        PluginError: Tensors are missing.
    """
    whose = origin("exporters", exporter)
    if not whose.is_checked_whole or exporters().get(exporter).reader is None or not is_of_its_config(model):
        return
    reader = reader_of(exporter)
    if isinstance(reader, ReadsOwnFiles):
        return
    try:
        with silenced():
            stored, shards = reader.configuration(quantization_block(directory), directory), check_shards(directory)
            with torch.device("meta"):
                expected: Any = empty_model(directory, None)
            if not {name for name, _ in expected.named_modules()} <= {name for name, _ in model.named_modules()}:
                return
            prepared(reader, expected, stored, directory, whose)
            _, missing = _placed(expected, placed_by(reader, expected, stored.config), shards, stored.config.exclude)
    except PluginError:
        raise
    except QuarkError:
        return  # an attempt to read the export reports this error
    if missing:
        raise whose.error(f"has written files that lack {len(missing)} tensor(s) that its reader needs: {folded(missing)}")


def _placed(
    model: nn.Module, place_of: Callable[[str, Tensor], str], shards: Iterable[Shard], exclude: Collection[str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return messages about stored tensors that do not fit the model, and the names of missing tensors.

    The reader of the layout must have prepared ``model`` before the call.
    """
    found, misfits = place_headers(model, place_of, shards, exclude)
    tie(model, found)
    found |= fill_zero_points(model, found)
    try:
        return tuple(misfits), tuple(without_source(model.state_dict(keep_vars=True), found))
    except QuarkError as error:
        return (*misfits, str(error)), ()


def _bad_scales(shards: Iterable[Shard]) -> Iterator[str]:
    """Yield a message for each stored scale tensor that contains NaN or infinite values."""
    files = FileTensors([*shards])
    with files.reading(torch.device("cpu")) as read:
        for name in (name for name in files.meta if "scale" in name.rpartition(".")[2]):
            scale = read(name, torch.float32)
            if scale.is_floating_point() and not bool(torch.isfinite(scale.float()).all()):
                yield f"'{name}' holds scales that are NaN or infinite"
