"""Names that several distributions claim, names that none claims, and names that change at run time."""

from __future__ import annotations

from typing import Any

import pytest

from quark.errors import AmbiguousNameError, ConfigError, PluginError, UnknownNameError, UnsupportedError
from quark.plugins import Catalog, SchemeRecord, Source


def provide(*calls: str) -> str:
    """Return a plugin module with these calls of ``scheme``."""
    return "@hookimpl\ndef quark_register_schemes():\n" + "".join(f"    yield scheme({call})\n" for call in calls)


@pytest.fixture
def contested(site: Any) -> Any:
    """Two distributions that claim ``int4``."""
    site.install("acme-quant", provide("'int4', summary='acme'", "'acme'"), version="0.1")
    site.install("zeta-quant", provide("'int4', summary='zeta', aliases=['i4']"), version="0.2")
    return site


def test_a_name_claimed_twice_fails_only_when_it_is_asked_for(contested: Any) -> None:
    catalog = contested.collect(QUARK_STRICT_PLUGINS="1")
    schemes = catalog.registries["schemes"]
    assert catalog.failures() == ()
    assert schemes.get("acme").name == "acme"
    assert "int4" in schemes
    with pytest.raises(AmbiguousNameError) as caught:
        schemes.get("int4")
    for part in ("acme-quant 0.1", "zeta-quant 0.2", "'acme-quant:int4'", "'zeta-quant:int4'", "replaces=", "QUARK_DISABLED_PLUGINS"):
        assert part in str(caught.value)


def test_the_distribution_in_front_says_which_is_meant(contested: Any) -> None:
    schemes = contested.collect().registries["schemes"]
    assert schemes.get("acme-quant:int4").summary == "acme"
    assert schemes.get("Zeta_Quant:int4").summary == "zeta"
    assert schemes.get("zeta-quant:i4").summary == "zeta"


def test_every_name_that_is_listed_can_be_had(contested: Any) -> None:
    schemes = contested.collect().registries["schemes"]
    assert schemes.names() == ["acme", "acme-quant:int4", "good", "zeta-quant:int4"]
    assert [schemes.get(name) for name in schemes.names()] == list(schemes)
    assert len(schemes) == 4


def test_conflicts_are_listed_with_their_claimants(contested: Any) -> None:
    conflicts = contested.collect().registries["schemes"].conflicts()
    assert {name: [s.distribution for s in sources] for name, sources in conflicts.items()} == {
        "i4": ["acme-quant", "zeta-quant"],
        "int4": ["acme-quant", "zeta-quant"],
    }


def test_an_alias_that_is_another_distributions_name_is_a_conflict(site: Any) -> None:
    site.install("acme-quant", provide("'a', aliases=['x']"))
    site.install("zeta-quant", provide("'x'"))
    schemes = site.collect().registries["schemes"]
    with pytest.raises(AmbiguousNameError, match="'acme-quant:a' or 'zeta-quant:x'"):
        schemes.get("x")
    assert schemes.get("a").name == "a"


def test_a_record_may_replace_another_distributions(contested: Any) -> None:
    contested.install("best-quant", provide("'int4', summary='best', replaces='acme-quant'"))
    with pytest.raises(AmbiguousNameError, match=r"best-quant 1\.0 .* and by .*zeta-quant"):
        contested.collect().registries["schemes"].get("int4")
    schemes = contested.collect(QUARK_DISABLED_PLUGINS="zeta-quant").registries["schemes"]
    assert schemes.get("int4").summary == "best"
    assert schemes.names() == ["acme", "good", "int4"]
    assert schemes.conflicts() == {}
    assert schemes.get("acme-quant:int4").summary == "acme", "what is replaced can still be asked for"


def test_an_alias_of_what_is_replaced_leads_to_the_replacement(site: Any) -> None:
    site.install("old", provide("'a', summary='old', aliases=['x']"))
    site.install("new", provide("'a', summary='new', replaces='old'"))
    assert site.collect().registries["schemes"].get("x").summary == "new"


def test_two_that_replace_the_same_conflict_again(site: Any) -> None:
    site.install("old", provide("'a'"))
    site.install("new", provide("'a', replaces='old'"))
    site.install("newer", provide("'a', replaces='old'"))
    with pytest.raises(AmbiguousNameError, match="'new:a' or 'newer:a'"):
        site.collect().registries["schemes"].get("a")


def test_two_that_replace_each_other_conflict(site: Any) -> None:
    site.install("ping", provide("'a', replaces='pong'"))
    site.install("pong", provide("'a', replaces='ping'"))
    with pytest.raises(AmbiguousNameError, match="'ping:a' or 'pong:a'"):
        site.collect().registries["schemes"].get("a")


def test_an_unknown_name_gets_the_closest_match_and_the_whole_list(site: Any) -> None:
    site.install("acme-quant", provide("'acme_int3'"))
    with pytest.raises(UnknownNameError) as caught:
        site.collect().registries["schemes"].get("acme_itn3")
    assert "Did you mean 'acme_int3'?" in str(caught.value)
    assert "Installed schemes: acme_int3, good." in str(caught.value)
    assert (caught.value.kind, caught.value.name, caught.value.known) == ("scheme", "acme_itn3", ("acme_int3", "good"))


@pytest.mark.parametrize(
    ("kind", "distribution"),
    [
        ("formats", "quark-schemes"),
        ("observers", "quark-schemes"),
        ("schemes", "quark-schemes"),
        ("algorithms", "quark-algos"),
        ("templates", "quark-templates"),
        ("exporters", "quark-exporters"),
    ],
)
def test_an_unknown_name_says_which_built_in_distribution_is_missing(kind: str, distribution: str) -> None:
    with pytest.raises(UnknownNameError, match=f"pip install {distribution}"):
        Catalog().registries[kind].get("x")


def test_a_distribution_that_is_there_is_not_said_to_be_missing(site: Any) -> None:
    site.install("quark-schemes", provide("'a'"))
    with pytest.raises(UnknownNameError) as caught:
        site.collect().registries["schemes"].get("b")
    assert "pip install" not in str(caught.value)


def test_what_is_registered_at_run_time_is_found_and_can_be_taken_away(site: Any) -> None:
    schemes = site.collect().registries["schemes"]
    schemes.register(SchemeRecord(name="mine", config="json:dumps", aliases=("me",)))
    assert schemes.get("me").name == "mine"
    assert schemes.source("mine") == Source("run-time")
    schemes.unregister("mine")
    assert "mine" not in schemes
    assert "me" not in schemes


def test_a_name_that_is_taken_cannot_be_registered_at_run_time(site: Any) -> None:
    schemes = site.collect().registries["schemes"]
    with pytest.raises(ConfigError, match=r"'good' is taken by plugin 'good-quant' of good-quant 2\.5"):
        schemes.register(SchemeRecord(name="other", config="json:dumps", aliases=("good",)))
    schemes.register(SchemeRecord(name="good", config="json:loads", replaces="good-quant"))
    assert str(schemes.get("good").config) == "json:loads"


def test_what_a_plugin_brings_cannot_be_unregistered(site: Any) -> None:
    with pytest.raises(ConfigError, match="QUARK_DISABLED_PLUGINS=good-quant"):
        site.collect().registries["schemes"].unregister("good")
    with pytest.raises(UnknownNameError, match="no scheme 'goood'"):
        site.collect().registries["schemes"].unregister("goood")


def test_only_records_of_the_kind_are_registered(site: Any) -> None:
    catalog = site.collect()
    with pytest.raises(ConfigError, match="a FormatRecord is needed"):
        catalog.registries["formats"].register(SchemeRecord(name="x", config="json:dumps"))


def test_a_reference_is_loaded_when_it_is_asked_for(site: Any) -> None:
    import json

    assert site.collect().registries["schemes"].load_config("good") is json.dumps


@pytest.mark.parametrize("target", ["not_a_module_at_all:x", "json:not_an_attribute"])
def test_a_reference_that_leads_nowhere_names_its_plugin(site: Any, target: str) -> None:
    site.install("acme-quant", f"@hookimpl\ndef quark_register_schemes():\n    yield SchemeRecord(name='a', config='{target}')")
    schemes = site.collect().registries["schemes"]
    assert schemes.names() == ["a", "good"]
    with pytest.raises(PluginError, match=rf"'config' of the scheme 'a' points at '{target}'.*acme-quant 1\.0.*pip install --upgrade"):
        schemes.load_config("a")


def test_a_field_that_is_left_empty_is_said_to_be(site: Any) -> None:
    with pytest.raises(UnsupportedError, match="the scheme 'good' of good-quant has no kv_cache"):
        site.collect().registries["schemes"].load_kv_cache("good")
