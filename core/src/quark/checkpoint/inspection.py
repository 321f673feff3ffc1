"""Inspection of a checkpoint: whether it is complete, and which runtimes would load it.

No runtime is run.
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
    """Support of a checkpoint by one runtime.

    Attributes:
        runtime: Its name.
        summary: A short description of it.
        methods: Names of quantized layers, folded, by the method of the runtime that computes them.
        refusals: Why it would not load the checkpoint, or would compute something else; empty if it would
            load it.
        notes: Further remarks.
        own_layers: Names of the layers that its own kernels would compute, even if it refuses the checkpoint
            because of other layers.
    """

    runtime: str
    summary: str
    methods: Mapping[str, str]
    refusals: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    own_layers: frozenset[str] = attrs.field(default=frozenset(), repr=False)

    @property
    def loads(self) -> bool:
        """Whether it would load the checkpoint and compute the exported model."""
        return not self.refusals


@attrs.frozen(eq=False)
class CheckpointFacts:
    """A checkpoint as an `Inspector` gets it; no weight has been read.

    Attributes:
        directory: The checkpoint.
        layout: Name of its layout.
        block: Its ``quantization_config``.
        config: The parsed configuration from the layout's reader.
        plan: The quantization of each layer of the model.
        heads: Names of the output heads.
    """

    directory: Path
    layout: str
    block: Mapping[str, Any]
    config: QConfig
    plan: QuantPlan
    heads: frozenset[str]

    def number(self, name: str) -> float | None:
        """Return the number in a stored tensor with one element; None if there is no such tensor."""
        files = FileTensors(check_shards(self.directory))
        if name not in files.meta or files.meta[name].numel() != 1:
            return None
        with files.reading(torch.device("cpu")) as read:
            return float(read(name, torch.float32).float())


class Inspector(Protocol):
    """Says which runtimes support a checkpoint, for one layout.

    Third parties name such a class as ``inspector`` of an `ExporterRecord`.
    """

    def support(self, facts: CheckpointFacts) -> Iterable[RuntimeSupport]:
        """Yield the support by each runtime."""


@attrs.frozen
class Inspection:
    """The result of the inspection of a checkpoint.

    Attributes:
        layout: Name of its layout.
        damage: Messages about parts that are missing, do not fit the model, or have changed since they were
            written; empty if the checkpoint is complete.
        runtimes: Support by each runtime; empty if the checkpoint is damaged, or its layout has no inspector.
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
    """Return an `Inspection`: the damage of a checkpoint, and its support by runtimes.

    Scales are read, and weights only to ``verify`` them.

    Args:
        directory: A quantized checkpoint in a layout that an installed plugin reads.
        trust_remote_code: Whether code that comes with the checkpoint may run.
        verify: Whether to compare all bytes with the checksums from when they were written
            (`quark.checkpoint.run_file.verify`); if they differ, nothing else is inspected.
        build: Makes the float model of the directory; by default the class that config.json names.

    Raises:
        CheckpointError: It is not a quantized checkpoint, no installed layout reads it, or there are no
            checksums to ``verify`` it with.
        UnsupportedError: The reader of its layout does not support a part of it.
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
    """Check, from headers, that the files of an export have all tensors that its layout's reader needs.

    The check is skipped for this project's own exporters
    (`quark.plugins.attribution.Origin.is_checked_whole`). It is skipped if the layout has no reader, or if
    its reader reads its own files or does not read this export. It is also skipped for models that
    transformers would not build from the export's config.json.

    Args:
        exporter: Name of the exporter.
        directory: Its output.
        model: The model that it has written; meta tensors suffice.

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
        return  # reading it reports the error
    if missing:
        raise whose.error(f"has written files that lack {len(missing)} tensor(s) that its reader needs: {folded(missing)}")


def _placed(
    model: nn.Module, place_of: Callable[[str, Tensor], str], shards: Iterable[Shard], exclude: Collection[str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the stored tensors that do not fit the prepared model, and the tensors that are missing."""
    found, misfits = place_headers(model, place_of, shards, exclude)
    tie(model, found)
    found |= fill_zero_points(model, found)
    try:
        return tuple(misfits), tuple(without_source(model.state_dict(keep_vars=True), found))
    except QuarkError as error:
        return (*misfits, str(error)), ()


def _bad_scales(shards: Iterable[Shard]) -> Iterator[str]:
    """Yield the scales that are not finite."""
    files = FileTensors([*shards])
    with files.reading(torch.device("cpu")) as read:
        for name in (name for name in files.meta if "scale" in name.rpartition(".")[2]):
            scale = read(name, torch.float32)
            if scale.is_floating_point() and not bool(torch.isfinite(scale.float()).all()):
                yield f"'{name}' holds scales that are NaN or infinite"
