"""Formats with one thing wrong each."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import torch
from torch import Tensor

from quark.base.lazy import ObjectRef
from quark.config.tensor import QTensorConfig
from quark.numbers import Granularity, NumberFormat, Packing, PerGroup
from quark.plugins import FormatRecord

from . import broken_formats, broken_quantizers, broken_vectors
from .mutant import Mutant

__all__ = ["HEALTHY", "MUTANTS"]


class CountsForLong(broken_formats.Plain):
    numbers = itertools.count()

    def round_(self, t: Tensor, zero: Tensor | None = None) -> Tensor:
        return broken_formats.Plain.round_(self, t.add_(0.3 * (next(self.numbers) > 200)), zero)


class LeavesTheTail(broken_formats.Plain):
    """Rounds four thousand columns of a row alone."""

    def round_(self, t: Tensor, zero: Tensor | None = None) -> Tensor:
        tail = t[..., 4096:].clone()
        super().round_(t, zero)
        if zero is None:
            t[..., 4096:] = tail.ceil().clamp(-8, 7)
        return t


class Locked(broken_formats.Plain):
    """Holds a lock, which is neither copied nor pickled."""

    def __init__(self) -> None:
        self.lock = threading.Lock()


class Backwards(PerGroup):
    """Takes the scales of a row back in the wrong order."""

    def reduce_scale(self, expanded: Tensor, shape: tuple[int, ...]) -> Tensor:
        return expanded.flip(-1)


class InBackwardGroups(broken_formats.Plain):
    def granularity(self, spec: QTensorConfig, *, activation: bool) -> Granularity:
        usual = super().granularity(spec, activation=activation)
        return Backwards(usual.size) if type(usual) is PerGroup else usual


class Draws(broken_formats.Plain):
    def round_(self, t: Tensor, zero: Tensor | None = None) -> Tensor:
        return super().round_(t.add_(0 * torch.rand(1)), zero)


def with_packing(packing: Packing) -> NumberFormat:
    value = broken_formats.Plain()
    value.packing = packing
    return value


def with_fields(**fields: Any) -> NumberFormat:
    value = broken_formats.Plain()
    for name, content in fields.items():
        setattr(value, name, content)
    return value


def record_of(value: Any, **fields: Any) -> FormatRecord:
    return FormatRecord(**({"name": "mutant_format", "bits": 4, "format": ObjectRef(value), "capabilities": {"zero_point"}} | fields))


def mutant(check: str, about: str, value: Any, says: str = "", **fields: Any) -> Mutant:
    return Mutant(f"format:{check}", about, (record_of(value, **fields),), says=says)


def vector_mutant(check: str, about: str, value: Any) -> Mutant:
    return mutant(check, about, value, bits=value.bits, capabilities=())


HEALTHY = (record_of(broken_formats.Plain()),)
MUTANTS = (
    vector_mutant("rounds_each_vector_by_itself", "is moved by the first number of a row", broken_vectors.LooksAtNeighbours()),
    vector_mutant("rounds_to_the_nearest_vector", "prefers even numbers", broken_vectors.TakesAnother()),
    vector_mutant("rounds_to_the_nearest_vector", "has more vectors than codes", broken_vectors.SaysFewerBits()),
    vector_mutant("rounds_in_a_metric", "rounds a copy", broken_vectors.RoundsACopy()),
    vector_mutant("rounds_in_a_metric", "leaves its values", broken_vectors.LeavesTheGrid()),
    vector_mutant("rounds_in_a_metric", "rounds to the other side", broken_vectors.RoundsFarther()),
    vector_mutant("learns_a_table_of_any_weight", "wants four weights", broken_vectors.LearnsOfMany()),
    vector_mutant("learns_a_table_of_any_weight", "changes the importance", broken_vectors.UsesImportanceUp()),
    vector_mutant("learns_a_table_of_any_weight", "keeps a graph", broken_vectors.LearnsWithAGraph()),
    vector_mutant("learns_a_table_of_any_weight", "gives a part of the weight", broken_vectors.LearnsAView()),
    vector_mutant("learns_the_same_table", "learns another table each time", broken_vectors.LearnsByChance()),
    vector_mutant("learns_the_same_table", "learns too small a table", broken_vectors.LearnsTooFew()),
    vector_mutant("learns_the_same_table", "learns in float64", broken_vectors.LearnsInDouble()),
    mutant("is_what_its_record_says", "names an observer that is not there", broken_formats.WrongName()),
    mutant("is_what_its_record_says", "names its storage dtype instead of giving it", with_fields(storage_dtype="int8")),
    mutant("is_what_its_record_says", "has another name than its record", with_fields(name="another_name")),
    mutant("is_what_its_record_says", "has other bits than its record", broken_formats.Plain(), bits=5),
    mutant("is_what_its_record_says", "is a class instead of a value", broken_formats.Plain),
    mutant("serves_a_spec", "refuses every spec", broken_formats.ServesNothing()),
    mutant("answers_odd_specs", "answers True", broken_formats.AnswersTrue()),
    mutant("answers_odd_specs", "raises for a spec without qscheme", broken_formats.RaisesForOdd()),
    mutant("refuses_unknown_scales", "does not look at scale_format", broken_formats.AcceptsScales()),
    mutant("refuses_unknown_scales", "does not look at scale_calculation_mode", broken_formats.AcceptsModes()),
    mutant("canonicalizes_once", "doubles groups each time", broken_formats.GrowsGroups()),
    mutant("canonicalizes_once", "makes nothing of a spec", broken_formats.CanonicalizesToNothing()),
    mutant("serves_a_spec", "makes nothing of a spec", broken_formats.CanonicalizesToNothing()),
    mutant("rounds_in_place", "rounds a copy", broken_formats.ReturnsAnother()),
    mutant("rounds_in_place", "returns nothing", broken_formats.ReturnsNone()),
    mutant("rounds_the_same_each_time", "counts its calls", broken_formats.Counts()),
    mutant("rounds_the_same_each_time", "rounds otherwise after many calls", CountsForLong()),
    mutant("rounds_the_same_each_time", "draws from the generator of everybody", Draws()),
    mutant("keeps_rounded_values", "shrinks what it rounds", broken_formats.Creeps()),
    mutant("rounds_to_the_nearest_value", "uses every other value", broken_formats.HalfTheValues()),
    mutant("rounds_to_the_nearest_value", "rounds a quarter too high", broken_formats.OffTheGrid()),
    mutant("rounds_to_the_nearest_value", "errs by more than it declares", broken_formats.Plain(), error_bound=0.4),
    mutant("rounds_in_order", "rounds some numbers two steps up", broken_formats.Falls(), "rounds a number above 2."),
    mutant("saturates", "wraps around", broken_formats.Wraps()),
    mutant("saturates", "does not saturate", broken_formats.DoesNotSaturate()),
    mutant("reaches_max_magnitude", "claims to reach further than its codes do", broken_formats.ClaimsMore()),
    mutant("keeps_nan", "takes NaN for 0", broken_formats.HidesNan()),
    mutant("makes_no_nan", "divides 0 by 0", broken_formats.MakesNan()),
    mutant("rounds_zero_to_zero", "has no 0", broken_formats.NoZero()),
    mutant("rounds_parts_in_threads", "keeps a tensor between two steps", broken_formats.SharesScratch()),
    mutant("rounds_by_the_method_of_the_spec", "takes floor for ceil", broken_formats.AnyMethod()),
    mutant("splits_into_subscales_and_elements", "gives other subscales than it rounds by", broken_formats.Coupled()),
    mutant("encodes_in_the_storage_dtype", "encodes to int16", broken_formats.EncodesWide()),
    mutant("encodes_in_the_storage_dtype", "decodes to bfloat16", broken_formats.DecodesToHalf()),
    mutant("encodes_in_the_storage_dtype", "says another storage dtype", with_fields(storage_dtype=torch.uint8)),
    mutant("decodes_what_it_encodes", "decodes its largest code to another value", broken_formats.DecodesElse()),
    mutant("decodes_what_it_encodes", "leaves numbers beyond the range without a code", broken_formats.DoesNotSaturate()),
    mutant("gives_the_codes_of_rounded_values", "rounds otherwise in one step", broken_formats.OtherCodes()),
    mutant(
        "gives_the_codes_of_rounded_values", "writes other codes than it gives", with_fields(write_codes=lambda t, zero, out: out.fill_(0))
    ),
    mutant("leaves_values_and_codes_as_they_are", "writes into the values", broken_formats.EncodesInPlace()),
    mutant("packs_without_loss", "loses the last code of a row", with_packing(broken_formats.LosesTheLast())),
    mutant("packs_without_loss", "loses the lowest code", with_packing(broken_formats.LosesTheLowest())),
    mutant("packs_without_loss", "unpacks one order backwards", with_packing(broken_formats.SwapsOrder())),
    mutant("packs_meta_tensors", "looks at values", with_packing(broken_formats.LooksAtValues())),
    mutant("packs_meta_tensors", "announces another dtype", with_packing(broken_formats.DependsOnData())),
    mutant("stores_as_many_bits_as_it_says", "stores a byte for four bits", with_packing(Packing())),
    mutant("scales_survive_packing", "stores scales in float16", with_packing(broken_formats.HalfScales())),
    mutant("scales_survive_packing", "stores scales in the place of codes", with_packing(broken_formats.ClashingScales())),
    mutant("gives_usable_scales", "gives the scale 0 for zeros", broken_formats.ScaleOfZero()),
    mutant("gives_usable_scales", "gives NaN for an empty range", broken_formats.ScaleIsNan()),
    mutant("gives_usable_scales", "gives negative scales for negative ranges", broken_formats.NegativeScale()),
    mutant("gives_usable_scales", "gives float64 scales", broken_formats.ScaleInDouble()),
    mutant("gives_usable_scales", "gives a tensor", broken_formats.ScaleIsTensor()),
    mutant("gives_usable_scales", "gives one scale for all ranges", broken_formats.ScaleOfAll()),
    mutant("gives_usable_scales", "changes the ranges", broken_formats.ChangesRanges()),
    mutant("has_scales_that_fit_the_range", "gives a quarter of the scale", broken_formats.QuarterScale()),
    mutant("has_a_granularity_that_inverts", "takes scales back in the wrong order", InBackwardGroups()),
    mutant("works_on_an_accelerator", "decodes by a table that lies on the CPU", broken_formats.DecodesByTable()),
    mutant("simulates_what_it_exports", "decodes its largest code to another value", broken_formats.DecodesElse()),
    mutant("simulates_what_it_exports", "stores scales with fewer bits", with_packing(broken_formats.PacksElse())),
    mutant("unpacks_by_parts", "unpacks in the memory of the stored codes", with_packing(broken_formats.UnmasksInPlace())),
    mutant("knows_which_codes_survive", "has a spacing, and shrinks what it rounds", broken_formats.Creeps()),
    mutant("serves_rows_of_any_length", "rounds the tail of a long row up", LeavesTheTail()),
    mutant("is_copied_and_pickled", "holds a lock", Locked()),
    mutant("serves_a_vector", "reads vectors backwards", with_packing(broken_formats.BreaksVectors())),
    mutant("does_not_change_the_tensor", "clips the tensor in place", broken_quantizers.OwnQuantizer()),
    mutant("serves_hard_tensors", "has no 0", broken_formats.NoZero()),
    mutant("keeps_broken_values_visible", "makes numbers of NaN and infinity", broken_formats.HidesInf()),
    mutant("serves_empty_tensors", "wants at least one row", broken_formats.RefusesEmpty()),
    mutant("has_zero_points", "gives none", broken_formats.NoZeroPoint()),
    mutant("has_no_undeclared_zero_points", "does not declare them", broken_formats.Plain(), capabilities=()),
    mutant("is_rounded_by_every_algorithm", "does not round single columns", broken_formats.LeavesColumns()),
    mutant("serves_columns", "rounds single columns otherwise", broken_formats.RoundsMatricesElse()),
)
