# Written by tools/public_stubs.py: run it again after a change of names; do not edit.
from quark_amd.not_offered import RuntimeOptions as RuntimeOptions
from quark_schemes.emulation import even_round as even_round
from quark_schemes.emulation import reshape_to_blocks as reshape_to_blocks
