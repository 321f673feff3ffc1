# Written by tools/public_stubs.py: run it again after a change of names; do not edit.
from amd_quark_scripts.model_access import *
