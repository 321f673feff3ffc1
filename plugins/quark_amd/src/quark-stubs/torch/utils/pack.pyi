# Written by tools/public_stubs.py: run it again after a change of names; do not edit.
from quark_schemes.emulation import create_pack_method as create_pack_method
