# Written by tools/public_stubs.py: run it again after a change of names; do not edit.
from quark_algos.tuning.documented import BlockwiseJointTuningConfig as BlockwiseJointTuningConfig
from quark_algos.tuning.documented import BlockwiseTuningConfig as BlockwiseTuningConfig
