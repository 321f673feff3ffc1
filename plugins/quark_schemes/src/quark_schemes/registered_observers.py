"""Records of the observers in this distribution, which have the names of public classes.

This module does not import torch.
"""

from __future__ import annotations

from typing import Any

from quark.plugins import ObserverRecord, Option

__all__ = ["OBSERVERS"]


def _observer(name: str, place: str, summary: str, *other_names: str, **fields: Any) -> ObserverRecord:
    """Return the record of an observer class.

    Args:
        name: Name of the observer.
        place: Module and name of the class, as ``"module:Class"``. AMD Quark's public API has the same class
            name.
        summary: Summary of the observer.
        other_names: Further names of the class in AMD Quark's API.
        fields: Fields of the record.
    """
    class_name, reference = place.partition(":")[2], f"quark_schemes.observers.{place}"
    exports = dict.fromkeys((class_name, *other_names), reference)
    return ObserverRecord(name=name, class_name=class_name, summary=summary, observer=reference, exports=exports, **fields)


OBSERVERS: tuple[ObserverRecord, ...] = (
    _observer("placeholder", "min_max:PlaceholderObserver", "observes nothing"),
    _observer(
        "min_max",
        "min_max:MinMaxObserver",
        "smallest and largest value, one range for each scale",
        "UniformScalingObserver",
    ),
    _observer("per_tensor_min_max", "min_max:PerTensorMinMaxObserver", "smallest and largest value, one range"),
    _observer("per_channel_min_max", "min_max:PerChannelMinMaxObserver", "smallest and largest value, one range per channel or token"),
    _observer("per_group_min_max", "min_max:PerGroupMinMaxObserver", "smallest and largest value, one range per group"),
    _observer("per_block_mx", "min_max:PerBlockMXObserver", "smallest and largest value, one range per block of an MX format"),
    _observer("per_block_2d_min_max", "min_max:PerBlock2DMinMaxObserver", "smallest and largest value, one range per 2-D block"),
    _observer("per_block_bfp", "min_max:PerBlockBFPObserver", "smallest and largest value, one range per block of a block float"),
    _observer(
        "per_block_mx_buffer_reuse",
        "min_max:PerBlockMXBufferReuseObserver",
        "smallest and largest value, one range per block of an MX format",
    ),
    _observer("per_block_mx_diffs", "min_max:PerBlockMXDiffsObserver", "smallest and largest value, one range per block of an MX format"),
    _observer(
        "per_tensor_percentile",
        "percentile:PerTensorPercentileObserver",
        "the range that holds a given percentage of the values",
        options=(Option("percentile", float, 99.99999999, "Percentage of the values in the range: above 0, to 100; asymmetric from 50."),),
    ),
    _observer("per_tensor_mse", "mse:PerTensorMSEObserver", "the range of least squared error, one range"),
    _observer("per_channel_mse", "mse:PerChannelMSEObserver", "the range of least squared error, one per channel of a weight"),
    _observer("per_group_mse", "mse:PerGroupMSEObserver", "the range of least squared error, one per group of a weight"),
    _observer(
        "per_tensor_histogram",
        "histogram_ranges:PerTensorHistogramObserver",
        "the range with the least squared error among ranges that hold given percentages of the values",
    ),
    _observer(
        "per_tensor_histogram_pro",
        "histogram_ranges:PerTensorHistogramObserverPro",
        "the range between two histogram bins with the least expected squared error; integers only",
    ),
    _observer(
        "per_tensor_pow2_min_max",
        "power_of_two_scales:PerTensorPowOf2MinMaxObserver",
        "the power of two nearest to the min-max scale, one scale",
    ),
    _observer(
        "per_tensor_pow2_min_mse",
        "power_of_two_scales:PerTensorPowOf2MinMSEObserver",
        "the best of five powers of two by squared error, one scale",
    ),
    _observer(
        "per_channel_pow2_min_max",
        "power_of_two_scales:PerChannelPowOf2MinMaxObserver",
        "the power of two nearest to the min-max scale, one per channel",
    ),
    _observer(
        "per_channel_pow2_min_mse",
        "power_of_two_scales:PerChannelPowOf2MinMSEObserver",
        "the best of five powers of two by squared error, one scale per channel",
    ),
)
"""Every observer."""
