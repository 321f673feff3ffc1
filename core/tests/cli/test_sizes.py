"""Sizes as people write them."""

import pytest

from quark.cli.sizes import size_in_bytes
from quark.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "size"),
    [("700", 700), ("700B", 700), ("5GB", 5 * 10**9), ("5 gb", 5 * 10**9), ("512MiB", 512 << 20), ("1.5kB", 1500), ("2TiB", 2 << 40)],
)
def test_a_size_is_a_number_and_a_unit(text: str, size: int) -> None:
    assert size_in_bytes(text, "--size") == size


@pytest.mark.parametrize("text", ["", "GB", "-5GB", "5 parsecs", "0", "0.1B", "5GBB", "5IB", "nan", "1e9", "5 G"])
def test_what_is_no_size_is_refused_with_the_option(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^--size .* is no size: .*such as 5GB"):
        size_in_bytes(text, "--size")
