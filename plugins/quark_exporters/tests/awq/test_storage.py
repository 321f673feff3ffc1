"""What the AWQ layout cannot hold, and why."""

from __future__ import annotations

from typing import Any

import pytest

import quark
from quark.config.layer import QLayerConfig
from quark_exporters.awq.storage import AwqStorage


@pytest.mark.parametrize(
    ("scheme", "reason"),
    [
        ("int4_wo_32", None),
        ("uint4_wo_32", None),
        ("fp8", "AWQ quantizes weights alone, and its input is quantized"),
        ("mxfp4_weight_only", "AWQ holds int4 without and uint4 with zero points, and not"),
        (None, "its weight is float"),
    ],
)
def test_a_layer_that_it_does_not_hold_has_a_reason(scheme: str | None, reason: str | None) -> None:
    config: Any = QLayerConfig() if scheme is None else quark.schemes().load_config(scheme)()
    found = AwqStorage().why_not(config, (16, 64))
    assert found is None if reason is None else str(found).startswith(reason)


def test_output_channels_fill_words() -> None:
    config = quark.schemes().load_config("int4_wo_32")()
    assert AwqStorage().why_not(config, (12, 64)) == "AWQ packs 8 output channels into a word, and it has 12"
    assert AwqStorage().why_not(config, (24, 64)) is None
