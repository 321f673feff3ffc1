"""All names in a new distribution come from its own, which has to be one that an index and Python take."""

from __future__ import annotations

import keyword

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quark.base.names import is_valid_name
from quark.errors import ConfigError
from quark_devkit.new_plugin import Naming


@pytest.mark.parametrize(
    ("name", "package", "prefix", "class_prefix"),
    [
        ("acme-quant", "acme_quant", "acme", "Acme"),
        ("Acme_Quant", "acme_quant", "acme", "Acme"),
        ("quark-acme", "quark_acme", "acme", "Acme"),
        ("my.lab--quantization", "my_lab_quantization", "my_lab", "MyLab"),
        ("quant", "quant", "quant", "Quant"),
        ("quark-3bit", "quark_3bit", "quark_3bit", "Quark3bit"),
    ],
)
def test_names_follow_from_the_name_of_the_distribution(name: str, package: str, prefix: str, class_prefix: str) -> None:
    naming = Naming.of(name)
    assert (naming.package, naming.prefix, naming.class_prefix) == (package, prefix, class_prefix)


@pytest.mark.parametrize("name", ["", "-acme", "acme-", "acme quant", "acme/quant", "../acme", "acmé", "acme\n", "acme;rm", "a$b"])
def test_what_is_no_name_of_a_distribution_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="is not a distribution name"):
        Naming.of(name)


@pytest.mark.parametrize("name", ["3com-quant", "class", "import", "Lambda"])
def test_what_python_cannot_import_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="not a valid name in Python"):
        Naming.of(name)


@pytest.mark.parametrize("name", ["quark", "torch", "Json", "transformers"])
def test_the_name_of_another_package_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="is another package"):
        Naming.of(name)


@given(st.from_regex(r"[A-Za-z0-9._-]{1,20}", fullmatch=True))
def test_an_accepted_name_gives_names_that_python_and_quark_take(name: str) -> None:
    try:
        naming = Naming.of(name)
    except ConfigError:
        return
    assert naming.package.isidentifier()
    assert not keyword.iskeyword(naming.package)
    assert naming.class_of("int3").isidentifier()
    assert is_valid_name(naming.distribution)
    assert is_valid_name(f"{naming.prefix}_int3")
