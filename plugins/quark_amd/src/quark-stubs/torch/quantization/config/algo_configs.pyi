# Written by tools/public_stubs.py: run it again after a change of names; do not edit.
from quark_amd.algorithm_settings import get_algo_config as get_algo_config
from quark_amd.algorithm_settings import get_supported_algorithm_types as get_supported_algorithm_types
