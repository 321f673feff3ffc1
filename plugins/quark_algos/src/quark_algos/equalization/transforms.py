"""SmoothQuant, AutoSmoothQuant and AWQ as transforms: plumbing between the pipeline and `quark_algos.equalization`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from quark.algorithms import (
    AbsMax,
    AbsMean,
    BlockContext,
    Hessian,
    Metrics,
    ResolvedSettings,
    Rounding,
    Statistic,
    Validation,
    input_is_transformed,
    validated,
)
from quark.config.algorithm import AlgoConfig
from quark.config.architecture import Architecture
from quark.config.layer import QLayerConfig, levels
from quark.log import get_logger
from quark.modules.layers import linear_weight
from quark.planning.plan import QuantPlan
from quark.quantizers import WeightGrid, quantizer_for
from quark_algos.equalization.candidates import smoothquant
from quark_algos.equalization.config import AutoSmoothQuantConfig, AWQConfig, SmoothQuantConfig
from quark_algos.equalization.quadratic import Quadratic
from quark_algos.equalization.search import ActivationErrors, Loss, Part, autosmooth, awq
from quark_algos.gptq.damping import shrunk
from quark_algos.mappings.fold import Kept, allowed, fold, holds, probe
from quark_algos.mappings.mapping import LayerMapping, mappings_of
from quark_algos.mappings.resolve import ResolvedMapping, resolve
from quark_algos.mappings.skipped import left_out
from quark_algos.mappings.user_mappings import Place, check_user_mappings, user_mappings_of
from quark_algos.searched_nearest import SearchedNearest

__all__ = [
    "FEWEST",
    "ROWS",
    "SAMPLE",
    "SANE_ALPHA",
    "AutoSmoothQuant",
    "Awq",
    "ChannelRanges",
    "Equalization",
    "EqualizationRun",
    "SmoothQuant",
    "TokenSample",
    "rounding_of_inputs",
]

SAMPLE = 256
"""Tokens on which the rounding of activations is tried."""
FEWEST = 32
"""Tokens of each input, where the readers of a site have many inputs, as experts do."""
ROWS = 512
"""Rows of the readers, spread over all of them, on which scales are tried: what suits these suits the rest."""
SANE_ALPHA = 0.5
"""What the preset "best" takes for the documented default of 1, which leaves nothing of the weights' ranges."""


class TokenSample(Statistic):
    """Some tokens, float32: an eighth of `SAMPLE` of each batch, spread over it, until there are as many."""

    def __init__(self, columns: int, device: torch.device) -> None:
        super().__init__(columns, device)
        self.value = torch.empty(0, columns, device=device)

    def accumulate(self, x: Tensor, reference: Tensor | None) -> None:
        wanted = min(SAMPLE - len(self.value), SAMPLE // 8)
        self.value = torch.cat((self.value, x[:: max(1, len(x) // max(wanted, 1))][:wanted].float()))

    def add(self, other: TokenSample) -> None:
        self.value = torch.cat((self.value, other.value))[:SAMPLE]


class ChannelRanges(Statistic):
    """The smallest and the largest value of each input channel, ``[2, K]``, float32."""

    def __init__(self, columns: int, device: torch.device) -> None:
        super().__init__(columns, device)
        self.range = torch.tensor([[torch.inf], [-torch.inf]], device=device).repeat(1, columns)

    def accumulate(self, x: Tensor, reference: Tensor | None) -> None:
        self._widen(torch.stack((x.amin(0), x.amax(0))).float())

    def add(self, other: ChannelRanges) -> None:
        self._widen(other.range)

    def _widen(self, other: Tensor) -> None:
        self.range = torch.stack((torch.minimum(self.range[0], other[0]), torch.maximum(self.range[1], other[1])))

    @property
    def value(self) -> Tensor:
        """The largest magnitude of each channel, ``[K]``."""
        return self.range.abs().amax(0)


class Equalization(ABC):
    """Moves scale at the mappings of each block, and compares the block's error on held-out tokens before and after.

    Each mapping is probed once with a scale of its own before it is used: where a variant of a family computes something else than its
    facts say, the block's output changes, and the mapping is left out with a warning. Where the scales of a block do not make its error
    smaller by more than a standard error, the preset ``"best"`` takes them back; ``"reference"`` keeps them, and warns.

    Args:
        settings: An `AWQConfig`, `SmoothQuantConfig` or `AutoSmoothQuantConfig`.

    Attributes:
        preset: Of the settings.
        user_entries: Their ``scaling_layers``; empty for all mappings of the family.

    Raises:
        ConfigError: An entry of ``scaling_layers`` is incomplete, or its condition is not understood.
    """

    works_by_block = True
    needs: ClassVar[Sequence[type[Statistic]]] = ()

    def __init__(self, settings: AlgoConfig) -> None:
        assert isinstance(settings, AWQConfig | SmoothQuantConfig | AutoSmoothQuantConfig)  # its record's class
        self._settings = settings
        self.preset = settings.preset
        self.user_entries = tuple(settings.scaling_layers or [])
        user_mappings_of(list(self.user_entries), ())  # errors come before any work

    def resolve_for_model(self, model: nn.Module, plan: QuantPlan) -> ResolvedSettings:
        """Return the settings as they are, and a note for each mapping that this model does not have.

        Raises:
            ConfigError: None of the mappings written by hand is in the model.
        """
        facts, heads = plan.architecture, _heads_of(model)
        if facts is None:
            return ResolvedSettings(self._settings)
        check_user_mappings(user_mappings_of(list(self.user_entries), mappings_of(facts)), model, facts, heads)
        return ResolvedSettings(self._settings, left_out(self.mappings(facts), model, facts, heads))

    def start(self, model: nn.Module, plan: QuantPlan) -> EqualizationRun:
        """Return the run for a model; nothing outside its blocks is changed."""
        return EqualizationRun(self, _heads_of(model))

    def rounding(self) -> Rounding | None:
        """Round-to-nearest."""
        return None

    def mappings(self, facts: Architecture) -> tuple[Place, ...]:
        """Return the mappings written by hand, or all of the family."""
        known = mappings_of(facts)
        return user_mappings_of(list(self.user_entries) or [site.documented() for site in known], known)

    @abstractmethod
    def scale(self, modules: ResolvedMapping, block: BlockContext) -> Tensor | None:
        """Return the scale of a mapping, ``[C]``; None where nothing is known of its inputs."""

    def _read(self, modules: ResolvedMapping, block: BlockContext) -> dict[str, nn.Module]:
        """The readers that are quantized and that tokens reached."""
        return {n: m for n, m in modules.readers.items() if n in block.configs and n in block.statistics}

    def _combined(self, modules: ResolvedMapping, block: BlockContext, kind: type[AbsMax | AbsMean | ChannelRanges]) -> Tensor:
        """The largest of what the readers' inputs have, ``[K]``: experts read different tokens."""
        values = [s.value for n in self._read(modules, block) if (s := block.statistic(n, kind)) is not None]
        return torch.stack(values).amax(0)


class EqualizationRun:
    """An `Equalization` at work on one model.

    Args:
        transform: Says which mappings have which scales.
        heads: Of queries in the model's attention.
    """

    def __init__(self, transform: Equalization, heads: int) -> None:
        self._transform = transform
        self._heads = heads
        self._refused: set[LayerMapping] = set()
        self._probed: set[LayerMapping] = set()

    def apply_global(self, model: nn.Module) -> None:
        """Nothing is changed outside the blocks."""

    @torch.no_grad()
    def apply(self, block: BlockContext) -> Mapping[str, Metrics]:
        """Move scale at the mappings of a block, and take it back where that makes no error smaller (preset "best")."""
        before = block.output_error() if block.output_error else None
        kept: list[Kept] = []
        mappings = self._mappings(block)
        rotated = {m.name: [n for n, reader in m.readers.items() if input_is_transformed(reader)] for m in mappings}
        skipped: dict[str, Metrics] = {
            f"{block.name}.{name}".lstrip("."): {"left_out": f"the input of {names[0]} is rotated while the model runs"}
            for name, names in rotated.items()
            if names
        }
        metrics = dict(skipped)
        for modules in (m for m in mappings if not rotated[m.name]):
            scale = self._transform.scale(modules, block)
            if scale is not None and not bool((scale == 1).all()):
                kept.append(Kept.of(modules))
                fold(modules, scale)
                metrics[f"{block.name}.{modules.name}".lstrip(".")] = {"scale_min": float(scale.min()), "scale_max": float(scale.max())}
        if not kept:
            return metrics | {block.name: {"applied": False, "reason": "there is no place at which scale can be moved"}}
        if before is None or block.output_error is None:
            return metrics | {block.name: {"applied": True}}
        validation = validated([before], [block.output_error()])
        if not validation.is_improvement and self._transform.preset == "best":
            for one in reversed(kept):
                one.restore()
            reason = "it makes no error smaller by more than chance"
            return skipped | {block.name: {**validation.metrics(), "applied": False, "reason": reason}}
        if not validation.is_improvement:
            _warn(block.name, validation)
        return metrics | {block.name: {**validation.metrics(), "applied": True}}

    def _mappings(self, block: BlockContext) -> list[ResolvedMapping]:
        """The mappings of a block that hold in it, and have something to quantize behind them."""
        mappings: list[ResolvedMapping] = []
        for place in self._transform.mappings(block.architecture):
            site = place.site
            if site in self._refused or (place.condition is not None and not place.condition.holds(block.module)):
                continue
            resolved = (resolve(site, block.module, block.architecture, self._heads) for site in place.sites(block.module))
            modules = chain.from_iterable(made for made in resolved if not isinstance(made, str))
            wanted = [m for m in modules if any(name in block.configs for name in m.readers)]
            passes = not any(input_is_transformed(reader) for m in wanted for reader in m.readers.values())
            if wanted and passes and site not in self._probed and not self._is_sound(wanted[0], block, site):
                continue
            mappings += wanted
        return mappings

    def _is_sound(self, modules: ResolvedMapping, block: BlockContext, mapping: LayerMapping) -> bool:
        """Whether a scale there leaves the block's output what it is; if not, the mapping is refused from then on."""
        if block.output is None:
            return True
        self._probed.add(mapping)
        dtype = linear_weight(next(iter(modules.readers.values()))).dtype
        change = holds(modules, probe(modules), block.output)
        if change <= 16 * allowed(modules, dtype):
            return True
        self._refused.add(mapping)
        get_logger(__name__).warning(
            f"'{block.name}.{modules.name}' is left out: a scale there changes what the block computes (by {change:.1e}); this model is "
            "another variant of its family than the template's facts are about"
        )
        return False


def _warn(block: str, found: Validation) -> None:
    get_logger(__name__).warning(
        f"'{block}': moving scale makes the rounded block's error {found.factor:.2f} times as large on {found.tokens} held-out tokens "
        f"({found.before:.2g} to {found.after:.2g}, standard error {found.standard_error:.1g}). preset='best' would leave it out"
    )


def _heads_of(model: nn.Module) -> int:
    """Of queries in attention; 1 where the model does not say."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return int(getattr(text, "num_attention_heads", 1) or 1)


class SmoothQuant(Equalization):
    """``s = max|x|^α / max|w|^(1−α)``."""

    needs = (AbsMax,)

    def __init__(self, settings: AlgoConfig) -> None:
        super().__init__(settings)
        assert isinstance(settings, SmoothQuantConfig)
        self._alpha, self._smallest = settings.alpha, settings.scale_clamp_min
        if self.preset == "best" and settings.alpha == 1.0:
            self._alpha = SANE_ALPHA

    def scale(self, modules: ResolvedMapping, block: BlockContext) -> Tensor | None:
        readers = self._read(modules, block)
        if not readers:
            return None
        x = modules.channels.reduced(self._combined(modules, block, AbsMax), "max")
        w = torch.stack([linear_weight(m).abs().amax(0).float() for m in readers.values()]).amax(0)
        return smoothquant(x, modules.channels.reduced(w, "max"), self._alpha, self._smallest)


class _Searched(Equalization):
    """What AWQ and AutoSmoothQuant have in common: candidates compared by closed forms in the Hessian."""

    def _parts(self, modules: ResolvedMapping, block: BlockContext) -> dict[str, Part]:
        """The readers, those with one input and one spec as one part; each by the name of its first."""
        alike: dict[tuple[int, Any], list[str]] = {}
        for name in self._read(modules, block):
            alike.setdefault((id(block.statistics[name]), levels(block.configs[name].weight)), []).append(name)
        quadratics: dict[int, Quadratic] = {}
        parts = {}
        for (key, _), names in alike.items():
            hessian = cast("Hessian", block.statistic(names[0], Hessian))
            quadratic = quadratics.setdefault(key, Quadratic(shrunk(hessian.matrix(), hessian.shrinkage())))
            parts[names[0]] = _part([modules.readers[n] for n in names], block.configs[names[0]], quadratic, hessian.tokens)
        return parts


def _part(layers: Sequence[nn.Module], config: QLayerConfig, quadratic: Quadratic, tokens: int) -> Part:
    assert config.weight is not None
    quantizer = quantizer_for(config.weight, activation=False)
    weights = [linear_weight(layer) for layer in layers]
    # Scales that span rows depend on all of them.
    step = max(1, sum(w.shape[0] for w in weights) // ROWS) if quantizer.granularity.is_local else 1
    weights = [w[::step] for w in weights]
    rows = [w.shape[0] for w in weights]

    def grid_of(wt: Tensor) -> WeightGrid:
        return WeightGrid([quantizer] * len(rows), rows, wt)

    return Part(torch.cat(weights).t().float().contiguous(), quadratic, grid_of, tokens)


class Awq(_Searched):
    """AWQ: ``s`` a power of the mean magnitude of the inputs, searched; and, where no rounding is named, scales searched by the outputs."""

    needs = (Hessian, AbsMean)

    def rounding(self) -> Rounding | None:
        """AWQ's clipping, as a search of scales."""
        return SearchedNearest()

    def scale(self, modules: ResolvedMapping, block: BlockContext) -> Tensor | None:
        parts = self._parts(modules, block)
        if not parts:
            return None
        return awq(list(parts.values()), self._combined(modules, block, AbsMean), channels=modules.channels).scale


class AutoSmoothQuant(_Searched):
    """SmoothQuant with the share searched, by the errors of weights and of activations."""

    needs = (Hessian, ChannelRanges, TokenSample)

    def __init__(self, settings: AlgoConfig) -> None:
        super().__init__(settings)
        assert isinstance(settings, AutoSmoothQuantConfig)
        self._loss = cast("Loss", settings.compute_scale_loss)

    def scale(self, modules: ResolvedMapping, block: BlockContext) -> Tensor | None:
        parts = self._parts(modules, block)
        if not parts:
            return None
        errors = [_errors_of_inputs(name, block, len(parts)) for name in parts]
        x_max = self._combined(modules, block, ChannelRanges)
        return autosmooth(list(parts.values()), x_max, errors, channels=modules.channels, loss=self._loss).scale


def _errors_of_inputs(name: str, block: BlockContext, parts: int) -> ActivationErrors:
    """What rounding the inputs of a reader costs, of a site with that many parts."""
    sample = cast("TokenSample", block.statistic(name, TokenSample)).value
    ranges = cast("ChannelRanges", block.statistic(name, ChannelRanges)).range
    return ActivationErrors(sample[:: min(parts, SAMPLE // FEWEST)], ranges, rounding_of_inputs(block.configs[name]))


def rounding_of_inputs(config: QLayerConfig) -> Callable[[Tensor, Tensor], Tensor]:
    """How a layer's inputs will be rounded: a function of some of them ``[T, K]`` and of the range of all, ``[2, K]``.

    A static scale is that of all tokens where the observer takes their extremes; of others it is taken to be that of the tokens at hand.
    """
    if config.input_tensors is None:
        return lambda x, _: x
    quantizer = quantizer_for(config.input_tensors, activation=True)

    def round_(x: Tensor, ranges: Tensor) -> Tensor:
        if quantizer.is_float or quantizer.is_dynamic:
            return quantizer.fake_quantize(x)
        observer = quantizer.observer()
        observer.observe(ranges if observer.is_extremes else x)
        return quantizer.fake_quantize(x, quantizer.qparams_from(observer))

    return round_
