# Written by tools/public_stubs.py: run it again after a change of names; do not edit.
from quark_schemes.emulation import dq_mxfp4 as dq_mxfp4
from quark_schemes.emulation import qdq_mxfp4 as qdq_mxfp4
