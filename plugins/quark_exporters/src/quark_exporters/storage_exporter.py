"""StorageExporter: base of exporters whose layers are stored by a `quark.checkpoint.layer_storage.LayerStorage`."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from quark.checkpoint.checkpoint_exporter import DirectoryExporter
from quark.checkpoint.content import CheckpointContent
from quark.checkpoint.exporter import ExportOptions
from quark.checkpoint.layer_storage import LayerStorage, storage_parts
from quark.checkpoint.region import WHOLE, Region
from quark.checkpoint.shard_writer import Part
from quark.config.layer import QLayerConfig, TensorSpec
from quark.errors import UnsupportedError
from quark.modules.attention import KEY, QUERY, VALUE
from quark.names import folded
from quark.planning.plan import QuantPlan
from quark.planning.plan_row import PlanRow
from quark.quantizers import canonicalize
from quark_exporters.float_layers import is_float, routers

__all__ = ["StorageExporter", "coded_rows", "float_names"]


class StorageExporter(DirectoryExporter):
    """Writes linear layers as a `LayerStorage` says, and refuses everything else before any work.

    Attributes:
        layout: Name of the layout, for messages.
        storage: How the tensors of a layer are stored.
    """

    layout: str
    storage: LayerStorage

    def parts(self, model: nn.Module, plan: QuantPlan, options: ExportOptions, region: Region = WHOLE) -> list[Part]:
        """As `DirectoryExporter.parts`."""
        return storage_parts(model, plan, options, self.storage, region)

    def refuse(self, content: CheckpointContent, options: ExportOptions) -> None:
        """As `DirectoryExporter.refuse`; every reason, with its layers, in one message."""
        reasons: dict[str, list[str]] = {}
        for name, reason in self.reasons(content, options):
            reasons.setdefault(reason, []).append(name)
        if reasons:
            what = "; ".join(reason + (f" ({folded(names)})" if any(names) else "") for reason, names in reasons.items())
            raise UnsupportedError(f"the layout '{self.layout}' cannot hold this model: {what}")

    def reasons(self, content: CheckpointContent, options: ExportOptions) -> Iterator[tuple[str, str]]:
        """Yield why a plan cannot be stored: the layer, or nothing where it is about the whole model, and the reason."""
        if options.weight_format != "real_quantized":
            yield "", f"it stores codes, and weight_format={options.weight_format} asks for rounded values"
        if names := [a.name for a in content.config.algo_config or () if a.runs_with_model()]:
            yield "", f"the algorithm {', '.join(names)} runs with the model, which its readers do not know"
        yield from _cache_reasons(content)
        for row in content.plan.quantized:
            reason = self._why_not(row)
            if reason is not None:
                yield row.name, reason

    def _why_not(self, row: PlanRow) -> str | None:
        config = row.quantized_to
        if is_float(row):
            return None
        if row.layer_type != "linear" or len(row.shape) != 2:
            return f"it has no place for a quantized layer of the type {row.layer_type}"
        if config.bias is not None:
            return "its bias is quantized"
        return self.storage.why_not(config, row.shape)


def coded_rows(plan: QuantPlan) -> dict[str, QLayerConfig]:
    """Return how the weight and the input of each layer with codes are quantized, by its name."""
    rows = {row.name: row.quantized_to for row in plan.quantized if not is_float(row)}
    return {name: QLayerConfig(weight=config.weight, input_tensors=config.input_tensors) for name, config in rows.items()}


def float_names(content: CheckpointContent) -> list[str]:
    """Return the names of linear layers, and of what runtimes take for such, that have no codes."""
    return [row.name for row in content.plan.rows if is_float(row)] + routers(content.model, content.config, content.plan)


def _cache_reasons(content: CheckpointContent) -> Iterator[tuple[str, str]]:
    """Yield what of attention and its cache these layouts have no place for: they know FP8 keys and values, each with one scale."""
    inside = {layer for row in content.plan.attentions for layer, _ in row.states.values()}
    for row in content.plan.attentions:
        if row.probabilities is not None or QUERY in row.states:
            yield row.name, "it has no place for scales of queries and of attention probabilities"
        elif KEY in row.states or VALUE in row.states:
            if not {KEY, VALUE} <= row.states.keys():
                yield row.name, "it has one scheme for the cache, and here keys or values alone are quantized"
            elif any(not _is_fp8_per_tensor(spec) for _, spec in row.states.values()):
                yield row.name, "it stores the cache in FP8 (E4M3) with one static scale"
    for plan_row in content.plan.quantized:
        if plan_row.quantized_to.output_tensors is not None and plan_row.name not in inside:
            yield (
                plan_row.name,
                "it stores scales of the cache as attention caches keys and values, and here outputs of projections are rounded: set "
                "kv_cache_post_rope=True, or leave output_tensors out",
            )


def _is_fp8_per_tensor(spec: TensorSpec) -> bool:
    specs = canonicalize(spec)
    first = specs[0]
    qscheme = None if first.qscheme is None else first.qscheme.name
    return (len(specs), first.dtype.name, qscheme, bool(first.is_dynamic)) == (1, "fp8_e4m3", "per_tensor", False)
