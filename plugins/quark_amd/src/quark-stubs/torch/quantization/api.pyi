# Written by tools/public_stubs.py: run it again after a change of names; do not edit.
from quark.runs import ModelQuantizer as ModelQuantizer
from quark_amd.parameters import load_params as load_params
