"""Triton kernels that do in one pass over a tensor what takes torch's operations several: rounding with scales, and its device code.

`quark.numbers.kernels` imports no Triton: the modules that hold kernels are imported when a tensor on a
device that uses them is first rounded.
"""

from quark.numbers.kernels.device_code import DeviceCode
from quark.numbers.kernels.devices import VARIABLE, uses_kernels
from quark.numbers.kernels.runs import Runs

__all__ = ["VARIABLE", "DeviceCode", "Runs", "uses_kernels"]
