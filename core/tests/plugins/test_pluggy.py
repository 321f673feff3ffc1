"""Features of pluggy work within a plugin and affect no other plugin: names of hooks, order, wrappers."""

from __future__ import annotations

from textwrap import dedent
from types import SimpleNamespace
from typing import Any

import pytest

SEVERAL = """
@hookimpl(specname="quark_register_schemes", trylast=True)
def at_the_end():
    yield scheme("same", summary="of the last")
    yield scheme("end")

@hookimpl(specname="quark_register_schemes"{order})
def begins():
    yield scheme("same", summary="of the first")

@hookimpl
def quark_register_formats():
    yield FormatRecord(name="own", format="json:dumps", bits=4)
"""
WRAPPERS = {
    "wrapper": """
@hookimpl(wrapper=True, specname="quark_register_schemes")
def without_some():
    results = yield
    return [[record for records in results for record in records if record.name != "hidden"], [scheme("more")]]
""",
    "hookwrapper": """
@hookimpl(hookwrapper=True, specname="quark_register_schemes")
def without_some():
    outcome = yield
    kept = [record for records in outcome.get_result() for record in records if record.name != "hidden"]
    outcome.force_result([kept, [scheme("more")]])
""",
}
WRAPPED = """
@hookimpl
def quark_register_schemes():
    yield scheme("hidden")
    yield scheme("shown")
"""


@pytest.mark.parametrize("order", ["", ", tryfirst=True"])
def test_a_hook_has_several_functions_by_specname_in_the_order_that_they_ask_for(order: str, site: Any) -> None:
    site.install("acme-quant", SEVERAL.format(order=order))
    catalog = site.collect()
    assert catalog.schemes.names() == ["end", "good", "same"]
    assert catalog.schemes.get("same").summary == "of the first"
    assert catalog.formats.names() == ["own"]
    (failure,) = catalog.failures()
    assert "yields the name 'same' a second time" in failure.error


@pytest.mark.parametrize("kind", WRAPPERS)
def test_a_wrapper_gets_the_results_of_its_plugin_and_of_no_other(kind: str, site: Any) -> None:
    site.install("acme-quant", WRAPPERS[kind] + WRAPPED, entry_point="acme")
    site.install("other-quant", "@hookimpl\ndef quark_register_schemes():\n    yield scheme('hidden')")
    catalog = site.collect()
    assert catalog.failures() == ()
    assert catalog.schemes.names() == ["good", "hidden", "more", "shown"]
    assert catalog.schemes.source("hidden").distribution == "other-quant"
    assert catalog.schemes.source("more").distribution == "acme-quant"


@pytest.mark.parametrize(("results", "kind"), [("None", "None"), ("[]", "None"), ("'none'", "a str"), ("[1]", "a int")])
def test_a_wrapper_that_gives_no_records_is_a_failure_of_its_plugin(results: str, kind: str, site: Any) -> None:
    wrapper = f"@hookimpl(wrapper=True, specname='quark_register_schemes')\ndef wrong():\n    yield\n    return {results}\n"
    site.install("acme-quant", wrapper + WRAPPED)
    catalog = site.collect()
    assert catalog.schemes.names() == ["good"]
    (failure,) = catalog.failures()
    assert f"returned {kind}, not an iterable of SchemeRecord" in failure.error


def test_a_wrapper_may_join_the_results_of_several_functions(site: Any) -> None:
    joins = """
        @hookimpl(wrapper=True, specname="quark_register_schemes")
        def joins():
            results = yield
            return [[record for records in results for record in records]]

        @hookimpl(specname="quark_register_schemes")
        def others():
            yield scheme("other")
    """
    site.install("acme-quant", dedent(joins) + WRAPPED)
    catalog = site.collect()
    assert catalog.failures() == ()
    assert catalog.schemes.names() == ["good", "hidden", "other", "shown"]


def test_one_of_two_functions_that_returns_nothing_is_a_failure(site: Any) -> None:
    site.install("acme-quant", "@hookimpl(specname='quark_register_schemes')\ndef forgets(): ...\n" + WRAPPED)
    (failure,) = site.collect().failures()
    assert "returned None, not an iterable of SchemeRecord" in failure.error


def test_all_functions_and_wrappers_of_a_listener_hear_an_event(site: Any) -> None:
    heard: list[str] = []
    site.install(
        "acme-quant",
        """
        @hookimpl
        def quark_on_event(event):
            event.heard.append("plain")

        @hookimpl(specname="quark_on_event", tryfirst=True)
        def before(event):
            event.heard.append("first")

        @hookimpl(specname="quark_on_event")
        def without_argument(): ...

        @hookimpl(specname="quark_on_event", wrapper=True)
        def around(event):
            event.heard.append("begin")
            result = yield
            event.heard.append("end")
            return result
        """,
    )
    catalog = site.collect()
    assert catalog.failures() == ()
    catalog.listeners.emit(SimpleNamespace(name="run_started", heard=heard))
    assert heard == ["begin", "first", "plain", "end"]
