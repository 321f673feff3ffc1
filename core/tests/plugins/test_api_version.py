"""Versions of the plugin API: if an older plugin fails, the message says where renamed names are listed."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from quark.errors import PluginError
from quark.plugins import API_VERSION, PluginWarning
from quark.plugins.failures import warn_of_unstated

PAGE = "docs/plugins/compatibility.md"
HOOK = "@hookimpl\ndef quark_register_schemes():\n    "


@pytest.mark.parametrize(
    "code",
    [
        "from quark.numerics import NumberFormat\n",
        "from quark.algorithms import Problem\n",
        "import quark.specs.tensor\n",
        f"{HOOK}from quark.specs.layer import QLayerConfig\n    yield scheme('old')\n",
        f"{HOOK}yield scheme('old', reads_back=True)\n",
        f"QUARK_API = (1, 1)\n{HOOK}yield scheme('old')\n",
    ],
    ids=["module", "name_of_a_module", "submodule", "in_a_hook", "field", "number"],
)
def test_the_failure_of_an_old_plugin_names_the_page(site: Any, code: str) -> None:
    site.install("old-quant", code)
    (failure,) = site.collect().failures()
    assert PAGE in failure.fix


def test_so_does_code_that_a_record_points_at(site: Any) -> None:
    (site.path / "old_quant_schemes.py").write_text("from quark.specs.layer import QLayerConfig\ndef build(): ...\n")
    code = f"{HOOK}yield SchemeRecord(name='old', config='old_quant_schemes:build')\n"
    site.install("old-quant", code)
    with pytest.raises(PluginError, match=PAGE):
        site.collect().schemes.load_config("old")


@pytest.mark.parametrize("code", ["import no_such_package\n", "raise TypeError('of another kind')\n"])
def test_other_failures_do_not(site: Any, code: str) -> None:
    site.install("acme-quant", code)
    (failure,) = site.collect().failures()
    assert PAGE not in failure.fix


@pytest.mark.parametrize(
    ("code", "is_unstated"),
    [
        (f"{HOOK}yield scheme('a')\n", True),
        (f"QUARK_API = ({API_VERSION}, {API_VERSION})\n{HOOK}yield scheme('a')\n", False),
        ("@hookimpl\ndef quark_on_event(event): ...\n", False),
    ],
    ids=["nothing", "the_plugin", "a_listener"],
)
def test_a_plugin_that_states_no_version_is_used_and_warned_of(site: Any, code: str, is_unstated: bool) -> None:
    site.install("acme-quant", code)
    catalog = site.collect()
    assert catalog.failures() == ()
    assert ("acme-quant" in {source.distribution for source in catalog.unstated()}) == is_unstated
    assert "quark-core" not in {source.distribution for source in catalog.unstated()}


def test_the_warning_says_what_to_write(site: Any) -> None:
    with pytest.warns(PluginWarning, match=rf"good-quant 2\.5 .* write QUARK_API = \({API_VERSION}, {API_VERSION}\).*{PAGE}"):
        warn_of_unstated(site.collect().unstated())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_unstated(())
