"""Fields of equalization algorithms that only older configurations have are no options."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from quark.plugins.options import settings_options
from quark_algos.equalization.config import AutoSmoothQuantConfig, AWQConfig, SmoothQuantConfig


@pytest.mark.parametrize("kind", [AutoSmoothQuantConfig, AWQConfig, SmoothQuantConfig])
def test_the_list_of_blocks_is_a_field_that_is_no_option(kind: Any) -> None:
    names = {option.name for option in settings_options(kind)}
    assert names
    assert "model_decoder_layers" in {field.name for field in attrs.fields(kind)} - names
