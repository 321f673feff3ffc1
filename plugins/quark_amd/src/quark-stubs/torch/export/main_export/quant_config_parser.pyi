# Written by tools/public_stubs.py: run it again after a change of names; do not edit.
from quark_amd.quant_config_parser import QuantConfigParser as QuantConfigParser
from quark_amd.quant_config_parser import get_layer_quant_config as get_layer_quant_config
