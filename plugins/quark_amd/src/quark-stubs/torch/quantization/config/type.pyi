# Written by tools/public_stubs.py: run it again after a change of names; do not edit.
from quark.config.enums import DeviceType as DeviceType
from quark.config.enums import Dtype as Dtype
from quark.config.enums import QSchemeType as QSchemeType
from quark.config.enums import QuantFlow as QuantFlow
from quark.config.enums import QuantizationMode as QuantizationMode
from quark.config.enums import RoundType as RoundType
from quark.config.enums import ScaleType as ScaleType
from quark.config.enums import ZeroPointType as ZeroPointType
