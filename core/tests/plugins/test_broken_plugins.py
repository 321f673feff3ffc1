"""If one plugin is broken, others keep working, and the message names plugin, version, stage and fix."""

from __future__ import annotations

import re
import warnings
from types import SimpleNamespace
from typing import Any

import pytest

import quark.plugins.catalog as process
from quark.errors import PluginError, UnknownNameError
from quark.plugins import Catalog, PluginFailure, PluginWarning, collection
from quark.plugins.discovery import discover

BROKEN = {
    "import fails": ("import a_module_that_is_not_there", "import", "ModuleNotFoundError", []),
    "import exits": ("raise SystemExit('bye')", "import", "SystemExit: bye", []),
    **{
        f"import raises {name}": (f"{made}\nraise {name}('bye')", "import", f"{name}: bye", [])
        for name, made in (("GeneratorExit", ""), ("Skipped", "class Skipped(BaseException): pass"), ("BaseException", ""))
    },
    **{
        f"{place} raises {name}": (
            f"class PanicException(BaseException): pass\n@hookimpl\ndef quark_register_schemes():\n{body.format(name)}",
            "call",
            f"raised {name}: bye{after}",
            kept,
        )
        for name in ("GeneratorExit", "PanicException", "SystemExit")
        for place, body, after, kept in (
            ("hook", "    raise {}('bye')", "", []),
            ("generator", "    yield scheme('early')\n    raise {}('bye')", " after 1 record, kept", ["early"]),
        )
    },
    "register panics": (
        "class Panic(BaseException): pass\ndef __dir__():\n    raise Panic('no listing')",
        "register",
        "Panic: no listing",
        [],
    ),
    "register fails": ("def __dir__():\n    raise RuntimeError('no listing')", "register", "RuntimeError: no listing", []),
    "hook raises": (
        "@hookimpl\ndef quark_register_schemes():\n    raise KeyError('x')",
        "call",
        "the hook 'quark_register_schemes' raised KeyError: 'x'",
        [],
    ),
    "generator raises late": (
        "@hookimpl\ndef quark_register_schemes():\n    yield scheme('early')\n    raise OSError('late')",
        "call",
        "raised OSError: late after 1 record, kept",
        ["early"],
    ),
    "wrong record type": (
        "@hookimpl\ndef quark_register_schemes():\n"
        "    yield FormatRecord(name='f', format='json:dumps', bits=4)\n    yield scheme('after')",
        "validate",
        "the hook 'quark_register_schemes' yields a FormatRecord instead of a SchemeRecord",
        ["after"],
    ),
    "not records at all": (
        "@hookimpl\ndef quark_register_schemes():\n    scheme('lost')",
        "validate",
        "the hook 'quark_register_schemes' returned None, not an iterable of SchemeRecord",
        [],
    ),
    "bad name": (
        "@hookimpl\ndef quark_register_schemes():\n    yield scheme('early')\n    yield scheme('Int-4!')",
        "call",
        "name 'Int-4!' is not a name",
        ["early"],
    ),
    "bad name that the record's own check did not see": (
        "@hookimpl\ndef quark_register_schemes():\n    record = scheme('early')\n"
        "    object.__setattr__(record, 'name', 'Int-4!')\n    yield record\n    yield scheme('after')",
        "validate",
        "name 'Int-4!' is not a name",
        ["after"],
    ),
    "one name twice": (
        "@hookimpl\ndef quark_register_schemes():\n    yield scheme('same')\n    yield scheme('other', aliases=['same'])",
        "validate",
        "yields the name 'same' a second time in one distribution",
        ["same"],
    ),
    "no hook at all": ("answer = 42", "register", "it implements no hook, and so provides nothing", []),
    "a choice that is none": (
        "@hookimpl\ndef quark_register_schemes():\n    yield scheme('s', stability='rock solid')",
        "call",
        "raised ValueError: 'stability' must be in ('stable', 'provisional', 'experimental') (got 'rock solid')",
        [],
    ),
    "misspelt hook": (
        "@hookimpl\ndef quark_register_scheme():\n    yield scheme('lost')\n"
        "@hookimpl\ndef quark_register_schemes():\n    yield scheme('kept')",
        "register",
        "there is no hook 'quark_register_scheme'",
        ["kept"],
    ),
    "misspelt hook without its mark": (
        "def quark_register_scheme():\n    yield scheme('lost')",
        "register",
        "the function 'quark_register_scheme' is not marked as a hook",
        [],
    ),
    "forgotten mark": (
        "def quark_register_schemes():\n    yield scheme('lost')",
        "register",
        "the function 'quark_register_schemes' is not marked as a hook",
        [],
    ),
    "unknown hook argument": (
        "@hookimpl\ndef quark_register_schemes(config, registry):\n    yield scheme('lost')",
        "register",
        "the hook 'quark_register_schemes' asks for unknown arguments (config, registry)",
        [],
    ),
    "unknown argument of the event hook": (
        "@hookimpl\ndef quark_on_event(event, run):\n    pass\n@hookimpl\ndef quark_register_schemes():\n    yield scheme('kept')",
        "register",
        "the hook 'quark_on_event' asks for unknown arguments (run)",
        ["kept"],
    ),
    "provider hook as wrapper": (
        "@hookimpl(wrapper=True)\ndef quark_register_schemes():\n    return (yield)",
        "register",
        "the hook 'quark_register_schemes' is written as a wrapper",
        [],
    ),
    "provider hook as old-style wrapper": (
        "@hookimpl(hookwrapper=True)\ndef quark_register_schemes():\n    yield",
        "register",
        "the hook 'quark_register_schemes' is written as a wrapper",
        [],
    ),
}
FIXES = {
    "no hook at all": "each marked with @hookimpl",
    "wrong record type": "yield SchemeRecord(",
    "not records at all": "yield each SchemeRecord",
    "one name twice": "give each record its own name",
    "misspelt hook": "perhaps 'quark_register_schemes' is meant",
    "misspelt hook without its mark": "perhaps 'quark_register_schemes' is meant",
    "forgotten mark": "write @hookimpl (from quark.plugins) above 'def quark_register_schemes'",
    "unknown hook argument": "write it with no arguments",
    "unknown argument of the event hook": "write it with only (event)",
    "provider hook as wrapper": "plain function",
    "provider hook as old-style wrapper": "plain function",
    "bad name that the record's own check did not see": "correct that field",
}


def only_failure(catalog: Catalog) -> PluginFailure:
    (failure,) = catalog.failures()
    return failure


@pytest.fixture(params=BROKEN)
def broken(request: pytest.FixtureRequest, site: Any) -> Any:
    site.case = request.param
    site.module = site.install("bad-quant", BROKEN[request.param][0], version="0.3", entry_point="bad")
    return site


def test_the_others_keep_working_and_what_was_sound_stays(broken: Any) -> None:
    schemes = broken.collect().registries["schemes"]
    assert schemes.names() == sorted(["good", *BROKEN[broken.case][3]])
    assert schemes.source("good").version == "2.5"


def test_the_failure_says_who_where_what_and_what_to_do(broken: Any) -> None:
    failure = only_failure(broken.collect())
    _, stage, error, _ = BROKEN[broken.case]
    assert failure.stage == stage
    assert error in failure.error
    text = str(failure)
    assert text.startswith(f"plugin 'bad' of bad-quant 0.3 ({broken.module}) failed at stage '{stage}': ")
    assert FIXES.get(broken.case, "QUARK_DISABLED_PLUGINS=bad-quant") in text.split("Fix: ")[1]


def test_an_unknown_name_says_which_plugin_is_broken(broken: Any) -> None:
    with pytest.raises(UnknownNameError, match=r"no scheme 'lost'.*plugin 'bad' of bad-quant 0\.3") as caught:
        broken.collect().registries["schemes"].get("lost")
    assert caught.value.known == tuple(broken.collect().registries["schemes"].names())


def test_in_strict_mode_the_failure_is_raised(broken: Any) -> None:
    with pytest.raises(PluginError, match=rf"bad-quant 0\.3 .* failed at stage '{BROKEN[broken.case][1]}'"):
        broken.collect(QUARK_STRICT_PLUGINS="1")


def test_leaving_the_broken_plugin_out_is_a_cure(broken: Any) -> None:
    catalog = broken.collect(QUARK_STRICT_PLUGINS="1", QUARK_DISABLED_PLUGINS="bad-quant")
    assert catalog.failures() == ()
    assert catalog.registries["schemes"].names() == ["good"]


def test_the_repr_of_no_field_is_in_a_message(broken: Any) -> None:
    assert "Attribute(" not in str(only_failure(broken.collect()))


def test_a_hook_that_never_ends_is_cut_off_by_name(site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collection, "MOST_RECORDS", 60)
    site.install(
        "bad-quant", "@hookimpl\ndef quark_register_schemes():\n    i = 0\n    while True:\n        i += 1\n        yield scheme(f's{i}')"
    )
    catalog = site.collect()
    assert len(catalog.registries["schemes"]) == 60 + len(["good"])
    assert "bad-quant 1.0" in str(only_failure(catalog))
    assert "yields more than 60 records" in only_failure(catalog).error


def test_a_hook_that_yields_nothing_but_wrong_records_is_cut_off_too(site: Any) -> None:
    site.install("bad-quant", "@hookimpl\ndef quark_register_schemes():\n    while True:\n        yield 'no record'")
    failures = site.collect().failures()
    assert len(failures) == collection.MOST_FAILURES + 1
    assert "the records after them are left out" in failures[-1].error


@pytest.mark.parametrize(
    ("requirement", "told"),
    [
        ("quark-core>=99", "it requires quark-core>=99, and quark-core 1.0"),
        ("Quark_Core (<0.5)", "it requires quark-core<0.5, and quark-core 1.0"),
        ("quark-core >= ninety", "is not a valid requirement"),
        ("quark-core>=1.0.0a1,<2", None),
        ("quark-core>=99; extra == 'new'", None),
        ("quark-core-tools>=99", None),
    ],
)
def test_a_plugin_made_for_another_core_is_told_of_and_works_as_far_as_it_does(requirement: str, told: str | None, site: Any) -> None:
    site.install("late-quant", "@hookimpl\ndef quark_register_schemes():\n    yield scheme('late')", requires=requirement)
    catalog = site.collect()
    assert catalog.registries["schemes"].names() == ["good", "late"]
    if told is None:
        assert catalog.failures() == ()
    else:
        assert only_failure(catalog).stage == "require"
        assert told in only_failure(catalog).error


def test_one_module_under_two_entry_points_is_registered_once(site: Any) -> None:
    site.install("twice", "@hookimpl\ndef quark_register_schemes():\n    yield scheme('t')", also="second = {module}\n")
    catalog = site.collect()
    assert catalog.registries["schemes"].names() == ["good", "t"]
    assert (only_failure(catalog).stage, only_failure(catalog).source.entry_point) == ("register", "second")


def test_failures_are_warned_about_once_in_a_process(site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    site.install("bad-quant", "1 / 0")
    with monkeypatch.context() as patch:
        patch.delenv("QUARK_STRICT_PLUGINS", raising=False)
        patch.setattr(process, "_current", None)
        patch.setattr(process, "discover", lambda path: discover([str(site.path)]))
        with pytest.warns(PluginWarning) as caught:
            first = process.catalog()
        failed, unstated = (str(warning.message) for warning in caught)
        assert re.search(r"bad-quant 1\.0 .*ZeroDivisionError", failed)
        assert "good-quant 2.5" in unstated
        assert "QUARK_API" in unstated
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert process.catalog() is first


PANICS = "class PanicException(BaseException): pass\n@hookimpl\ndef quark_on_event(event):\n    raise {}"
PRINTS = "@hookimpl\ndef quark_register_schemes():\n    print('hello')\n    yield scheme('mine')"


@pytest.mark.parametrize("error", ["GeneratorExit", "PanicException"])
def test_a_listener_that_raises_what_is_no_exception_is_named_and_ignored(error: str, site: Any, caplog: pytest.LogCaptureFixture) -> None:
    site.install("bad-quant", PANICS.format(error), entry_point="bad")
    site.collect().listeners.emit(SimpleNamespace(name="run_begins"))
    assert "plugin 'bad' of bad-quant" in caplog.text
    assert "raised in quark_on_event for 'run_begins'" in caplog.text


@pytest.mark.parametrize("code", ["raise KeyboardInterrupt", "@hookimpl\ndef quark_register_schemes():\n    raise KeyboardInterrupt"])
def test_an_interrupt_by_the_user_is_nobodys_failure(code: str, site: Any) -> None:
    site.install("slow-quant", code, entry_point="slow")
    with pytest.raises(KeyboardInterrupt):
        site.collect()


@pytest.mark.parametrize("code", ["print('hello')", PRINTS])
def test_what_a_plugin_prints_while_it_is_loaded_goes_to_stderr(code: str, site: Any, capsys: pytest.CaptureFixture[str]) -> None:
    site.install("loud-quant", code, entry_point="loud")
    site.collect()
    assert capsys.readouterr() == ("", "hello\n")
