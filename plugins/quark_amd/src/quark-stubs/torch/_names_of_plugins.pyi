# Written by tools/public_stubs.py: run it again after a change of names; do not edit.
from quark_algos.equalization.config import AWQConfig as AWQConfig
from quark_algos.equalization.config import AutoSmoothQuantConfig as AutoSmoothQuantConfig
from quark_algos.equalization.config import SmoothQuantConfig as SmoothQuantConfig
from quark_algos.gptq.config import GPTAQConfig as GPTAQConfig
from quark_algos.gptq.config import GPTQConfig as GPTQConfig
from quark_algos.gptq.config import QronosConfig as QronosConfig
from quark_algos.rotation.config import OnlineRotationConfig as OnlineRotationConfig
from quark_algos.rotation.config import QuaRotConfig as QuaRotConfig
from quark_algos.rotation.config import RotationConfig as RotationConfig
from quark_algos.tuning.documented import AutoRoundConfig as AutoRoundConfig
from quark_schemes.observers.histogram_ranges import PerTensorHistogramObserver as PerTensorHistogramObserver
from quark_schemes.observers.histogram_ranges import PerTensorHistogramObserverPro as PerTensorHistogramObserverPro
from quark_schemes.observers.min_max import MinMaxObserver as MinMaxObserver
from quark_schemes.observers.min_max import PerBlock2DMinMaxObserver as PerBlock2DMinMaxObserver
from quark_schemes.observers.min_max import PerBlockBFPObserver as PerBlockBFPObserver
from quark_schemes.observers.min_max import PerBlockMXBufferReuseObserver as PerBlockMXBufferReuseObserver
from quark_schemes.observers.min_max import PerBlockMXDiffsObserver as PerBlockMXDiffsObserver
from quark_schemes.observers.min_max import PerBlockMXObserver as PerBlockMXObserver
from quark_schemes.observers.min_max import PerChannelMinMaxObserver as PerChannelMinMaxObserver
from quark_schemes.observers.min_max import PerGroupMinMaxObserver as PerGroupMinMaxObserver
from quark_schemes.observers.min_max import PerTensorMinMaxObserver as PerTensorMinMaxObserver
from quark_schemes.observers.min_max import PlaceholderObserver as PlaceholderObserver
from quark_schemes.observers.mse import PerChannelMSEObserver as PerChannelMSEObserver
from quark_schemes.observers.mse import PerGroupMSEObserver as PerGroupMSEObserver
from quark_schemes.observers.mse import PerTensorMSEObserver as PerTensorMSEObserver
from quark_schemes.observers.percentile import PerTensorPercentileObserver as PerTensorPercentileObserver
from quark_schemes.observers.power_of_two_scales import PerChannelPowOf2MinMSEObserver as PerChannelPowOf2MinMSEObserver
from quark_schemes.observers.power_of_two_scales import PerChannelPowOf2MinMaxObserver as PerChannelPowOf2MinMaxObserver
from quark_schemes.observers.power_of_two_scales import PerTensorPowOf2MinMSEObserver as PerTensorPowOf2MinMSEObserver
from quark_schemes.observers.power_of_two_scales import PerTensorPowOf2MinMaxObserver as PerTensorPowOf2MinMaxObserver
from quark_schemes.specs.floats import Bfloat16Spec as Bfloat16Spec
from quark_schemes.specs.floats import FP8E4M3PerChannelSpec as FP8E4M3PerChannelSpec
from quark_schemes.specs.floats import FP8E4M3PerGroupSpec as FP8E4M3PerGroupSpec
from quark_schemes.specs.floats import FP8E4M3PerTensorSpec as FP8E4M3PerTensorSpec
from quark_schemes.specs.floats import FP8E5M2PerChannelSpec as FP8E5M2PerChannelSpec
from quark_schemes.specs.floats import FP8E5M2PerGroupSpec as FP8E5M2PerGroupSpec
from quark_schemes.specs.floats import FP8E5M2PerTensorSpec as FP8E5M2PerTensorSpec
from quark_schemes.specs.floats import FP8E5M3PerTensorSpec as FP8E5M3PerTensorSpec
from quark_schemes.specs.floats import Float16Spec as Float16Spec
from quark_schemes.specs.integer import Int2PerGroupSpec as Int2PerGroupSpec
from quark_schemes.specs.integer import Int3PerChannelSpec as Int3PerChannelSpec
from quark_schemes.specs.integer import Int3PerGroupSpec as Int3PerGroupSpec
from quark_schemes.specs.integer import Int4PerChannelSpec as Int4PerChannelSpec
from quark_schemes.specs.integer import Int4PerGroupSpec as Int4PerGroupSpec
from quark_schemes.specs.integer import Int4PerTensorSpec as Int4PerTensorSpec
from quark_schemes.specs.integer import Int8PerChannelSpec as Int8PerChannelSpec
from quark_schemes.specs.integer import Int8PerGroupSpec as Int8PerGroupSpec
from quark_schemes.specs.integer import Int8PerTensorSpec as Int8PerTensorSpec
from quark_schemes.specs.integer import Uint4PerChannelSpec as Uint4PerChannelSpec
from quark_schemes.specs.integer import Uint4PerGroupSpec as Uint4PerGroupSpec
from quark_schemes.specs.integer import Uint4PerTensorSpec as Uint4PerTensorSpec
from quark_schemes.specs.integer import Uint8PerChannelSpec as Uint8PerChannelSpec
from quark_schemes.specs.integer import Uint8PerGroupSpec as Uint8PerGroupSpec
from quark_schemes.specs.integer import Uint8PerTensorSpec as Uint8PerTensorSpec
from quark_schemes.specs.microscaling import AmdFP4Spec as AmdFP4Spec
from quark_schemes.specs.microscaling import BFP16Spec as BFP16Spec
from quark_schemes.specs.microscaling import FP4PerGroupSpec as FP4PerGroupSpec
from quark_schemes.specs.microscaling import FP6E2M3PerGroupSpec as FP6E2M3PerGroupSpec
from quark_schemes.specs.microscaling import FP6E3M2PerGroupSpec as FP6E3M2PerGroupSpec
from quark_schemes.specs.microscaling import MX6Spec as MX6Spec
from quark_schemes.specs.microscaling import MX9Spec as MX9Spec
from quark_schemes.specs.microscaling import OCP_MXFP4DiffsSpec as OCP_MXFP4DiffsSpec
from quark_schemes.specs.microscaling import OCP_MXFP4Spec as OCP_MXFP4Spec
from quark_schemes.specs.microscaling import OCP_MXFP6E2M3Spec as OCP_MXFP6E2M3Spec
from quark_schemes.specs.microscaling import OCP_MXFP6E3M2Spec as OCP_MXFP6E3M2Spec
from quark_schemes.specs.microscaling import OCP_MXFP8E4M3Spec as OCP_MXFP8E4M3Spec
from quark_schemes.specs.microscaling import OCP_MXFP8E5M2Spec as OCP_MXFP8E5M2Spec
from quark_schemes.specs.microscaling import OCP_MXINT8Spec as OCP_MXINT8Spec
from quark_schemes.specs.microscaling import OCP_MXSpec as OCP_MXSpec
from quark_schemes.specs.options import ProgressiveSpec as ProgressiveSpec
from quark_schemes.specs.options import ScaleQuantSpec as ScaleQuantSpec
from typing import Any
AmdFP4GlobalScaleScheme: Any
AmdFP4Scheme: Any
BFP16Scheme: Any
FP4Block16ScaleE4M3Scheme: Any
FP8Scheme: Any
INT4_FP8Scheme: Any
Int2WeightOnlyScheme: Any
Int3WeightOnlyScheme: Any
Int4WeightAndActivationScheme: Any
Int4WeightOnlyPerChannelScheme: Any
Int4WeightOnlyScheme: Any
Int8Scheme: Any
Int8WeightOnlyPerChannelScheme: Any
Int8WeightOnlyScheme: Any
MX6Scheme: Any
MX9Scheme: Any
MXFP4Scheme: Any
MXFP4WeightOnlyScheme: Any
MXFP4_FP8Scheme: Any
MXFP4_MXFP6E2M3Scheme: Any
MXFP6E2M3Scheme: Any
MXFP6E3M2Scheme: Any
PTPCFP8Scheme: Any
Uint4WeightOnlyPerChannelScheme: Any
Uint4WeightOnlyScheme: Any
UniformScalingObserver = MinMaxObserver
