"""Options of commands: KEY=VALUE, which is JSON where it is JSON and else the text.

And sizes as people write them.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quark.errors import ConfigError
from quark_workbench.commands.given_options import given_algorithm_options, given_options, size_in_bytes

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@given(json_values)
def test_json_comes_as_it_is_meant(value: Any) -> None:
    assert given_options("--scheme-option", [f"key={json.dumps(value)}"]) == {"key": value}


@pytest.mark.parametrize(
    ("text", "value"), [("1.5", 1.5), ("false", False), ("null", None), ("reorder", "reorder"), ("a=b", "a=b"), ('"1"', "1"), ("-3", -3)]
)
def test_what_is_no_json_is_text(text: str, value: object) -> None:
    found = given_options("--scheme-option", [f"key={text}"])["key"]
    assert (found, type(found)) == (value, type(value))


def test_options_of_algorithms_are_gathered_by_name() -> None:
    texts = ["gptq.damp_percent=0.05", "acme-quant:awq.preset=best", "gptq.desc_act=false"]
    assert given_algorithm_options("--algorithm-option", texts) == {
        "gptq": {"damp_percent": 0.05, "desc_act": False},
        "acme-quant:awq": {"preset": "best"},
    }


@pytest.mark.parametrize("text", ["key", "key=", "=1", ""])
def test_what_is_no_pair_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--exporter-option .* is not KEY=VALUE"):
        given_options("--exporter-option", [text])


@pytest.mark.parametrize("text", ["gptq=1", ".key=1", "gptq.=1", "gptq.key"])
def test_what_names_no_algorithm_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"is not NAME\.KEY=VALUE"):
        given_algorithm_options("--algorithm-option", [text])


def test_a_key_that_is_given_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="given twice for 'a'"):
        given_options("--scheme-option", ["a=1", "a=2"])
    with pytest.raises(ConfigError, match="given twice for 'a'"):
        given_algorithm_options("--algorithm-option", ["x.a=1", "x.a=2"])


@pytest.mark.parametrize(
    ("text", "size"),
    [("700", 700), ("700B", 700), ("5GB", 5 * 10**9), ("5 gb", 5 * 10**9), ("512MiB", 512 << 20), ("1.5kB", 1500), ("2TiB", 2 << 40)],
)
def test_a_size_is_a_number_and_a_unit(text: str, size: int) -> None:
    assert size_in_bytes(text, "--size") == size


@pytest.mark.parametrize("text", ["", "GB", "-5GB", "5 parsecs", "0", "0.1B", "5GBB", "5IB", "nan", "1e9", "5 G"])
def test_what_is_no_size_is_refused_with_the_option(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^--size .* is not a size: .*such as 5GB"):
        size_in_bytes(text, "--size")
