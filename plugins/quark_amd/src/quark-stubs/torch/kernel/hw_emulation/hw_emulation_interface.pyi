# Written by tools/public_stubs.py: run it again after a change of names; do not edit.
from quark_schemes.emulation import dequantize_fp4_fp6_per_group as dequantize_fp4_fp6_per_group
from quark_schemes.emulation import fake_quantize_fp4_fp6_per_group_with_scale as fake_quantize_fp4_fp6_per_group_with_scale
