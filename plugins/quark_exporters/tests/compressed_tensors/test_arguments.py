"""Arguments of compressed-tensors: a scheme that they hold is read back as it was."""

from __future__ import annotations

import pytest

import quark
from quark_exporters.compressed_tensors.arguments import arguments_of, spec_of


@pytest.mark.parametrize("scheme", ["int4_wo_32", "uint4_wo_per_channel", "int4_wa_64", "int8", "fp8", "ptpc_fp8", "mxfp4", "nvfp4"])
def test_the_specs_that_a_scheme_is_read_as_are_its_own(scheme: str) -> None:
    layer = quark.schemes().load_config(scheme)()
    for spec, activation in ((layer.weight, False), (layer.input_tensors, True)):
        if spec is not None:
            assert spec_of(arguments_of(spec, activation=activation), activation=activation) == spec
