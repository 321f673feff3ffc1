"""Mutants of checks of roundings."""

from __future__ import annotations

from typing import Any

from quark.base.lazy import ObjectRef
from quark.config.algorithm import AlgoConfig
from quark.plugins import AlgorithmRecord

from . import broken_roundings as broken
from .broken_settings import forgetting_all, having_an_idle_one, requiring_one, saying_nothing, taking_every_key
from .mutant import Mutant

__all__ = ["HEALTHY", "MUTANTS"]


def record_of(processor: Any = broken.Plain, config: type[AlgoConfig] = broken.Settings, **fields: Any) -> AlgorithmRecord:
    usual = {"config": ObjectRef(config), "processor": ObjectRef(processor), "capabilities": {"calibration"}}
    return AlgorithmRecord(name="mutant_rounding", kind="rounding", **(usual | fields))


HEALTHY = (record_of(),)


def _mutant(check: str, about: str, processor: Any = broken.Plain, config: type[AlgoConfig] = broken.Settings, **fields: Any) -> Mutant:
    return Mutant(f"rounding:{check}", about, (record_of(processor, config, **fields),))


MUTANTS = (
    _mutant("is_made_of_its_settings", "needs a text", broken.NeedsText),
    _mutant("default_settings_are_valid", "has settings that cannot be made without arguments", config=requiring_one(broken.Settings)),
    _mutant("settings_survive_json", "forgets its settings in JSON", config=forgetting_all(broken.Settings)),
    _mutant("refuses_unknown_settings", "takes every key", config=taking_every_key(broken.Settings)),
    _mutant("describes_its_settings", "says nothing of its options", config=saying_nothing(broken.Settings)),
    _mutant("heeds_its_options", "does nothing with one option", config=having_an_idle_one(broken.Settings)),
    _mutant("declares_calibration", "measures inputs and does not say so", capabilities=()),
    _mutant("says_to_which_layers_it_applies", "answers None", broken.AnswersNone),
    _mutant("says_to_which_layers_it_applies", "applies every second time", broken.AppliesEverySecondTime),
    _mutant("rounds_every_scheme", "rounds integers alone", broken.IntegersAlone),
    _mutant("excludes_schemes_that_there_are", "excludes a misspelt scheme", excluded_schemes={"int4_wo32": "its groups are small"}),
    _mutant("leaves_finite_weights_on_the_grid", "leaves NaN", broken.LeavesNan),
    _mutant("leaves_finite_weights_on_the_grid", "leaves values off the grid", broken.OffGrid),
    _mutant("leaves_finite_weights_on_the_grid", "rounds the first layer alone", broken.FirstLayerAlone),
    _mutant("leaves_finite_weights_on_the_grid", "sets other scales than it rounds by", broken.WrongScales),
    _mutant("keeps_shapes_and_dtypes", "turns weights into float32", broken.ToFloat32),
    _mutant("keeps_shapes_and_dtypes", "transposes weights", broken.Transposed),
    _mutant("leaves_the_float_parameter_alone", "writes to the float parameter", broken.InPlace),
    _mutant("changes_nothing_but_weights", "corrects biases", broken.CorrectsBias),
    _mutant("changes_nothing_but_weights", "leaves a hook", broken.LeavesAHook),
    _mutant("changes_nothing_but_weights", "adds a buffer", broken.AddsABuffer),
    _mutant("reports_json_values", "reports tensors", broken.ReportsTensors),
    _mutant("reports_json_values", "reports another layer", broken.ReportsOtherLayers),
    _mutant("uses_declared_statistics_alone", "uses a statistic that it does not declare", broken.Undeclared),
    _mutant("is_deterministic", "adds noise", broken.AtRandom),
    _mutant("is_deterministic", "remembers how often it was used", broken.Remembers),
    _mutant("is_deterministic", "rounds otherwise after many tasks", broken.CountsTasks),
    _mutant("is_deterministic", "seeds the generator of everybody", broken.Seeds),
    _mutant("merged_statistics_give_the_same", "forgets what was merged", broken.ByLargest),
    _mutant("statistics_are_sums_over_tokens", "does not count merged tokens", broken.ByForgetful),
    _mutant("merged_statistics_give_the_same", "takes the mean of two", broken.ByMeanOfTwo),
    _mutant("statistics_are_sums_over_tokens", "looks at the first batch alone", broken.ByFirstBatch),
    _mutant("statistics_are_sums_over_tokens", "keeps the tokens of one batch", broken.ByKept),
    _mutant("statistics_are_sums_over_tokens", "takes the mean of two", broken.ByMeanOfTwo),
    _mutant("statistics_are_sums_over_tokens", "adds the mean of each batch", broken.ByMeanOfBatches),
    _mutant("statistics_leave_inputs_alone", "keeps its inputs", broken.ByKept),
    _mutant("is_no_worse_than_round_to_nearest", "halves weights", broken.Halves),
    _mutant("survives_few_tokens", "divides by the number of tokens less one", broken.DividesByTokens),
    _mutant("survives_dead_channels", "divides by the size of inputs", broken.DividesByInputs),
    _mutant("survives_odd_layers", "divides by the size of weights", broken.DividesByWeights),
    _mutant("quantizes_a_model", "knows one block", broken.FirstBlockAlone),
    _mutant("leaves_other_layers_to_round_to_nearest", "applies to other layers each time that it is made", broken.WithTail),
    _mutant("works_on_an_accelerator", "multiplies by a tensor that it makes on the CPU", broken.OfTheCpu),
    _mutant("reloads_to_the_same_logits", "leaves a hook that no checkpoint holds", broken.ScalesOutputs),
    _mutant("is_copied_and_pickled", "leaves a lock in each layer", broken.LeavesALock),
    _mutant("is_the_same_on_two_ranks", "rounds to zero on all ranks but the first", broken.ByRank),
    _mutant("resumes_to_the_same_bytes", "rounds by how many blocks it has seen", broken.RemembersBlocks),
    _mutant("resumes_to_the_same_bytes", "keeps on its class which layers it has seen", broken.RemembersLayers),
    _mutant("streams_to_the_same_bytes", "rounds by how often it was called", broken.CountsBlocks),
)
