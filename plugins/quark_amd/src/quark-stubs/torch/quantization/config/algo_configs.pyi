# Written by tools/public_stubs.py: run it again after a change of names; do not edit.
from quark.config.templates import get_algo_config as get_algo_config
from quark.config.templates import get_supported_algorithm_types as get_supported_algorithm_types
