"""The observers that this distribution registers, under their public class names. Imports no torch."""

from __future__ import annotations

from quark.plugins import ObserverRecord, Option

__all__ = ["OBSERVERS"]


OBSERVERS: tuple[ObserverRecord, ...] = (
    ObserverRecord(
        name="placeholder",
        class_name="PlaceholderObserver",
        summary="observes nothing",
        observer="quark_schemes.observers.min_max:PlaceholderObserver",
        exports={"PlaceholderObserver": "quark_schemes.observers.min_max:PlaceholderObserver"},
    ),
    ObserverRecord(
        name="min_max",
        class_name="MinMaxObserver",
        summary="smallest and largest value, with one range for whatever shares a scale",
        observer="quark_schemes.observers.min_max:MinMaxObserver",
        exports={
            "MinMaxObserver": "quark_schemes.observers.min_max:MinMaxObserver",
            "UniformScalingObserver": "quark_schemes.observers.min_max:MinMaxObserver",
        },
    ),
    ObserverRecord(
        name="per_tensor_min_max",
        class_name="PerTensorMinMaxObserver",
        summary="smallest and largest value, one range",
        observer="quark_schemes.observers.min_max:PerTensorMinMaxObserver",
        exports={"PerTensorMinMaxObserver": "quark_schemes.observers.min_max:PerTensorMinMaxObserver"},
    ),
    ObserverRecord(
        name="per_channel_min_max",
        class_name="PerChannelMinMaxObserver",
        summary="smallest and largest value, one range per channel or token",
        observer="quark_schemes.observers.min_max:PerChannelMinMaxObserver",
        exports={"PerChannelMinMaxObserver": "quark_schemes.observers.min_max:PerChannelMinMaxObserver"},
    ),
    ObserverRecord(
        name="per_group_min_max",
        class_name="PerGroupMinMaxObserver",
        summary="smallest and largest value, one range per group",
        observer="quark_schemes.observers.min_max:PerGroupMinMaxObserver",
        exports={"PerGroupMinMaxObserver": "quark_schemes.observers.min_max:PerGroupMinMaxObserver"},
    ),
    ObserverRecord(
        name="per_block_mx",
        class_name="PerBlockMXObserver",
        summary="smallest and largest value, one range per block of an MX format",
        observer="quark_schemes.observers.min_max:PerBlockMXObserver",
        exports={"PerBlockMXObserver": "quark_schemes.observers.min_max:PerBlockMXObserver"},
    ),
    ObserverRecord(
        name="per_block_2d_min_max",
        class_name="PerBlock2DMinMaxObserver",
        summary="smallest and largest value, one range per 2-D block",
        observer="quark_schemes.observers.min_max:PerBlock2DMinMaxObserver",
        exports={"PerBlock2DMinMaxObserver": "quark_schemes.observers.min_max:PerBlock2DMinMaxObserver"},
    ),
    ObserverRecord(
        name="per_block_bfp",
        class_name="PerBlockBFPObserver",
        summary="smallest and largest value, one range per block of a block float",
        observer="quark_schemes.observers.min_max:PerBlockBFPObserver",
        exports={"PerBlockBFPObserver": "quark_schemes.observers.min_max:PerBlockBFPObserver"},
    ),
    ObserverRecord(
        name="per_block_mx_buffer_reuse",
        class_name="PerBlockMXBufferReuseObserver",
        summary="smallest and largest value, one range per block of an MX format",
        observer="quark_schemes.observers.min_max:PerBlockMXBufferReuseObserver",
        exports={"PerBlockMXBufferReuseObserver": "quark_schemes.observers.min_max:PerBlockMXBufferReuseObserver"},
    ),
    ObserverRecord(
        name="per_block_mx_diffs",
        class_name="PerBlockMXDiffsObserver",
        summary="smallest and largest value, one range per block of an MX format",
        observer="quark_schemes.observers.min_max:PerBlockMXDiffsObserver",
        exports={"PerBlockMXDiffsObserver": "quark_schemes.observers.min_max:PerBlockMXDiffsObserver"},
    ),
    ObserverRecord(
        name="per_tensor_percentile",
        class_name="PerTensorPercentileObserver",
        summary="the range that holds a given percentage of the values",
        observer="quark_schemes.observers.histogram:PerTensorPercentileObserver",
        options=(Option("percentile", float, 99.99999999, "Percentage of the values in the range: above 0, to 100; asymmetric from 50."),),
        exports={"PerTensorPercentileObserver": "quark_schemes.observers.histogram:PerTensorPercentileObserver"},
    ),
    ObserverRecord(
        name="per_tensor_mse",
        class_name="PerTensorMSEObserver",
        summary="the range of least squared error, one range",
        observer="quark_schemes.observers.mse:PerTensorMSEObserver",
        exports={"PerTensorMSEObserver": "quark_schemes.observers.mse:PerTensorMSEObserver"},
    ),
    ObserverRecord(
        name="per_channel_mse",
        class_name="PerChannelMSEObserver",
        summary="the range of least squared error, one per channel of a weight",
        observer="quark_schemes.observers.mse:PerChannelMSEObserver",
        exports={"PerChannelMSEObserver": "quark_schemes.observers.mse:PerChannelMSEObserver"},
    ),
    ObserverRecord(
        name="per_group_mse",
        class_name="PerGroupMSEObserver",
        summary="the range of least squared error, one per group of a weight",
        observer="quark_schemes.observers.mse:PerGroupMSEObserver",
        exports={"PerGroupMSEObserver": "quark_schemes.observers.mse:PerGroupMSEObserver"},
    ),
    ObserverRecord(
        name="per_tensor_histogram",
        class_name="PerTensorHistogramObserver",
        summary="of the narrowest ranges that hold given percentages of the values, the one of least squared error",
        observer="quark_schemes.observers.histogram_ranges:PerTensorHistogramObserver",
        exports={"PerTensorHistogramObserver": "quark_schemes.observers.histogram_ranges:PerTensorHistogramObserver"},
    ),
    ObserverRecord(
        name="per_tensor_histogram_pro",
        class_name="PerTensorHistogramObserverPro",
        summary="of all ranges between two bins of a histogram, the one of least expected squared error; integers only",
        observer="quark_schemes.observers.histogram_ranges:PerTensorHistogramObserverPro",
        exports={"PerTensorHistogramObserverPro": "quark_schemes.observers.histogram_ranges:PerTensorHistogramObserverPro"},
    ),
    ObserverRecord(
        name="per_tensor_pow2_min_max",
        class_name="PerTensorPowOf2MinMaxObserver",
        summary="the power of two nearest to the min-max scale, one scale",
        observer="quark_schemes.observers.power_of_two_scales:PerTensorPowOf2MinMaxObserver",
        exports={"PerTensorPowOf2MinMaxObserver": "quark_schemes.observers.power_of_two_scales:PerTensorPowOf2MinMaxObserver"},
    ),
    ObserverRecord(
        name="per_tensor_pow2_min_mse",
        class_name="PerTensorPowOf2MinMSEObserver",
        summary="of five powers of two, the scale of least squared error, one scale",
        observer="quark_schemes.observers.power_of_two_scales:PerTensorPowOf2MinMSEObserver",
        exports={"PerTensorPowOf2MinMSEObserver": "quark_schemes.observers.power_of_two_scales:PerTensorPowOf2MinMSEObserver"},
    ),
    ObserverRecord(
        name="per_channel_pow2_min_max",
        class_name="PerChannelPowOf2MinMaxObserver",
        summary="the power of two nearest to the min-max scale, one per channel",
        observer="quark_schemes.observers.power_of_two_scales:PerChannelPowOf2MinMaxObserver",
        exports={"PerChannelPowOf2MinMaxObserver": "quark_schemes.observers.power_of_two_scales:PerChannelPowOf2MinMaxObserver"},
    ),
    ObserverRecord(
        name="per_channel_pow2_min_mse",
        class_name="PerChannelPowOf2MinMSEObserver",
        summary="of five powers of two, the scale of least squared error, one per channel",
        observer="quark_schemes.observers.power_of_two_scales:PerChannelPowOf2MinMSEObserver",
        exports={"PerChannelPowOf2MinMSEObserver": "quark_schemes.observers.power_of_two_scales:PerChannelPowOf2MinMSEObserver"},
    ),
)
"""Every observer."""
