"""Commands come from records: a broken one is an error of its own, and the others work."""

from __future__ import annotations

import subprocess
import sys
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from quark.base.lazy import ObjectRef
from quark.errors import AmbiguousNameError, PluginError, QuarkError, UnknownNameError
from quark.plugins import Catalog, CommandRecord, Record, Source, hookimpl, using
from quark.plugins.discovery import discover
from quark_workbench.cli import main
from quark_workbench.cli.commands import typer_command
from quark_workbench.cli.listing import answer
from quark_workbench.cli.main import program


def greet(name: Annotated[str, typer.Argument(help="Whom to greet.")], times: int = 1) -> None:
    """Greet somebody."""
    print(*[f"Hello {name}"] * times, sep="\n")


def refuse() -> None:
    raise QuarkError("not today")


def stumble() -> None:
    raise KeyError("scale")


def stop() -> None:
    raise typer.Exit(3)


def unreadable(value: int | str) -> None:
    """Take an argument of a type that typer does not support."""


several = typer.Typer()
several.command("greet")(greet)
several.command("stop")(stop)


def with_commands(*records: Record, distribution: str = "acme-quant", catalog: Catalog | None = None) -> Catalog:
    """Return ``catalog``, by default the core's, with a plugin that registers ``records``."""

    def register(self: object) -> list[Record]:
        return list(records)

    register.__name__ = "quark_register_commands"
    catalog = Catalog() if catalog is None else catalog
    plugin = type("Plugin", (), {"quark_register_commands": hookimpl(register)})()
    catalog.add(plugin, Source(distribution, "0.1", "acme_quant.plugin", "acme"))
    return catalog


def command(name: str, target: object, **more: object) -> CommandRecord:
    return CommandRecord(name=name, command=ObjectRef(target) if not isinstance(target, str) else target, **more)  # type: ignore[arg-type]


def called(catalog: Catalog, *arguments: str) -> tuple[int, str]:
    """Exit code and output of ``quark …``; errors are raised."""
    with using(catalog):
        done = CliRunner().invoke(program(), arguments, catch_exceptions=False, env={"COLUMNS": "200", "TERM": "dumb"})
    return done.exit_code, done.output


def test_a_plugin_adds_a_command_with_arguments_and_options() -> None:
    catalog = with_commands(command("acme-greet", greet, summary="Say hello."))
    assert called(catalog, "acme-greet", "Ada", "--times", "2") == (0, "Hello Ada\nHello Ada\n")
    code, text = called(catalog, "acme-greet", "--help")
    assert code == 0
    assert "Greet somebody." in text
    assert "Whom to greet." in text


def test_a_plugin_adds_a_command_that_has_commands() -> None:
    catalog = with_commands(command("acme", several))
    assert called(catalog, "acme", "greet", "Ada") == (0, "Hello Ada\n")
    assert called(catalog, "acme", "stop") == (3, "")


def test_the_help_lists_commands_under_their_headings_by_their_records_alone() -> None:
    records = (command("acme-sick", "acme_nowhere:sick", summary="Is never imported."), command("acme-greet", greet, group="Acme"))
    code, text = called(with_commands(*records, catalog=Catalog(discover())), "--help")
    assert code == 0
    commands, _, rest = text.partition("Listings")
    listings, _, acme = rest.partition("Acme")
    assert "Is never imported." in commands
    assert commands.index("quantize") < commands.index("plan ") < commands.index("acme-sick")
    assert "graph_ops" in listings
    assert "acme-greet" in acme


def test_a_command_whose_code_cannot_be_imported_names_its_plugin_and_leaves_the_others() -> None:
    catalog = with_commands(command("acme-sick", "acme_nowhere:sick"), command("acme-greet", greet), catalog=Catalog(discover()))
    with pytest.raises(PluginError, match=r"'acme_nowhere:sick'.*No module named.*plugin 'acme' of acme-quant 0.1.*QUARK_DISABLED_PLUGINS"):
        called(catalog, "acme-sick")
    assert called(catalog, "acme-greet", "Ada") == (0, "Hello Ada\n")
    assert called(catalog, "inspect", "--help")[0] == 0


@pytest.mark.parametrize(("target", "said"), [(7, "is a int instead of a callable"), (unreadable, "cannot be read by typer")])
def test_a_command_that_is_none_is_an_error_of_its_plugin(target: object, said: str) -> None:
    with pytest.raises(PluginError, match=rf"(?s){said}.*acme-quant|acme-quant.*{said}"):
        called(with_commands(command("acme-none", target)), "acme-none")


def test_a_plugin_that_fails_leaves_the_commands_of_others() -> None:
    catalog = with_commands(command("acme-greet", greet))
    catalog.add(object(), Source("bad-quant", "1.0", "bad", "bad"))
    assert catalog.failures()
    assert called(catalog, "acme-greet", "Ada") == (0, "Hello Ada\n")


def test_a_name_that_two_distributions_claim_is_called_by_the_distributions_name() -> None:
    catalog = with_commands(command("quantize", greet), catalog=Catalog(discover()))
    with pytest.raises(AmbiguousNameError, match=r"claimed by plugin 'workbench' of quark-workbench.*acme-quant.*'acme-quant:quantize'"):
        called(catalog, "quantize", "Ada")
    assert called(catalog, "acme-quant:quantize", "Ada") == (0, "Hello Ada\n")
    code, text = called(catalog, "--help")
    assert code == 0
    assert "quark-workbench:quantize" in text
    with using(with_commands(command("schemes", greet))):
        assert not answer(["schemes"])


def test_a_command_that_replaces_one_of_the_core_is_called() -> None:
    catalog = with_commands(command("schemes", greet, replaces="quark-core"))
    assert called(catalog, "schemes", "Ada") == (0, "Hello Ada\n")
    with using(catalog):
        assert not answer(["schemes"])


def test_an_unknown_command_says_what_comes_close_and_which_distribution_brings_it() -> None:
    with pytest.raises(UnknownNameError, match=r"there is no command 'quantise'\. Did you mean 'quantize'\?"):
        called(Catalog(discover()), "quantise")
    brought = {"quantize": "quark-workbench", "check": "quark-devkit", "new-plugin": "quark-devkit", "demo": "quark-tiny-model"}
    for name, distribution in brought.items():
        with pytest.raises(UnknownNameError, match=rf"^there is no command '{name}'. It comes with .*: pip install {distribution}.$"):
            called(Catalog(), name)
        assert Catalog(discover()).commands.source(name).distribution == distribution


@pytest.mark.parametrize(
    ("target", "said"),
    [(refuse, "quark: not today"), (stumble, "KeyError: 'scale'. Raised by the command 'acme-fails' of plugin 'acme' of acme-quant 0.1")],
)
def test_an_error_of_a_command_is_one_sentence(
    target: object, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["quark", "acme-fails"])
    with using(with_commands(command("acme-fails", target))), pytest.raises(SystemExit) as ended:
        main.main()
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_with_debug_an_error_shows_the_traceback_that_python_writes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["quark", "acme-fails", "--debug"])
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    with using(with_commands(command("acme-fails", refuse))), pytest.raises(QuarkError) as caught:
        main.main()
    sys.excepthook(caught.type, caught.value, caught.tb)
    said = capsys.readouterr().err
    assert said.startswith("Traceback (most recent call last):\n")
    assert "\nquark.errors.QuarkError: not today\n" in said


def test_every_command_has_the_summary_that_its_help_begins_with() -> None:
    catalog = Catalog(discover())
    assert {"quantize", "check", "demo"} <= set(catalog.commands.names())
    for record in catalog.commands:
        text = " ".join((typer_command(record.name, catalog).help or "").partition("\n\n")[0].split())
        assert text == record.summary


@pytest.mark.parametrize("arguments", [["--help"], ["commands", "--json"], ["check", "--help"], ["quantize", "--help"]])
def test_help_imports_no_torch(arguments: list[str]) -> None:
    code = (
        "import sys\nfrom quark_workbench.cli.main import main\n"
        "try:\n    main()\nfinally:\n    print(*sys.modules, file=sys.stderr)\n"
    )  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    assert not {"torch", "transformers"} & set(done.stderr.splitlines()[-1].split())
