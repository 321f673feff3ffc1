"""Documented names that come with records."""

from __future__ import annotations

import json
from typing import Any

import pytest

from quark.errors import AmbiguousNameError, PluginError, UnknownNameError
from quark.plugins import documented_object, using


def exporting(name: str, exports: dict[str, str], more: str = "") -> str:
    return f"@hookimpl\ndef quark_register_schemes():\n    yield scheme('{name}', exports={exports!r}{more})\n"


def test_a_documented_name_is_the_object_behind_its_reference(site: Any) -> None:
    site.install("acme-quant", exporting("a", {"AcmeSpec": "json:dumps", "quark.torch.acme:AcmeThing": "json:loads"}))
    with using(site.collect()):
        assert documented_object("AcmeSpec") is json.dumps
        assert documented_object("quark.torch.acme:AcmeThing") is json.loads


def test_an_unknown_documented_name_says_what_may_be_missing(site: Any) -> None:
    site.install("acme-quant", exporting("a", {"AcmeSpec": "json:dumps"}))
    with using(site.collect()), pytest.raises(UnknownNameError, match=r"'AcmeSpek'\. Did you mean 'AcmeSpec'\?.*pip install quark-algos"):
        documented_object("AcmeSpek")


def test_a_name_that_two_distributions_export_differently_fails_when_it_is_asked_for(site: Any) -> None:
    site.install("acme-quant", exporting("a", {"Spec": "json:dumps", "m:Spec": "json:dumps"}))
    site.install("zeta-quant", exporting("z", {"Spec": "json:loads", "m:Spec": "json:loads", "m:Other": "json:loads"}))
    with using(site.collect(QUARK_STRICT_PLUGINS="1")):
        for name in ("Spec", "m:Spec"):
            with pytest.raises(AmbiguousNameError, match=r"acme-quant 1\.0.* and .*zeta-quant 1\.0.*replaces="):
                documented_object(name)


def test_the_same_object_exported_twice_is_no_conflict(site: Any) -> None:
    site.install("acme-quant", exporting("a", {"Spec": "json:dumps"}))
    site.install("zeta-quant", exporting("z", {"Spec": "json:dumps"}))
    with using(site.collect()):
        assert documented_object("Spec") is json.dumps


def test_a_record_that_replaces_another_brings_its_documented_names_too(site: Any) -> None:
    site.install("old", exporting("a", {"Spec": "json:dumps", "Kept": "json:dumps"}))
    site.install("new", exporting("a", {"Spec": "json:loads"}, ", replaces='old'"))
    with using(site.collect()):
        assert documented_object("Spec") is json.loads
        assert documented_object("Kept") is json.dumps


def test_a_documented_name_that_cannot_be_loaded_names_its_plugin(site: Any) -> None:
    site.install("acme-quant", exporting("a", {"Spec": "json:nothing_there"}))
    with using(site.collect()), pytest.raises(PluginError, match=r"public name 'Spec' points at 'json:nothing_there'.*acme-quant 1\.0"):
        documented_object("Spec")
