"""The listing commands show plugins, sound and broken, and their records."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import Any

import pytest
from typer.testing import CliRunner

from quark.plugins import Catalog, registry, using
from quark_workbench.cli import listing
from quark_workbench.cli.installed import kind_report
from quark_workbench.cli.main import program

PLUGIN = '''
    QUARK_API = (1, 99)
    import attrs
    from quark.plugins import AlgorithmRecord, ExporterRecord, ObserverRecord, TemplateRecord
    from quark.config.algorithm import AlgoConfig
    from quark.config.architecture import Architecture
    from quark.config.layer import QLayerConfig
    from quark.config.tensor import QTensorConfig

    @hookimpl
    def quark_register_formats():
        yield FormatRecord(name="int4", bits=4, summary="4 bits", format="acme:int4")
        yield FormatRecord(name="fp8_e4m3", bits=8, format="acme:fp8")

    @hookimpl
    def quark_register_schemes():
        yield SchemeRecord(name="w4a8", config=f"{__name__}:w4a8", kv_cache="acme:cache", aliases=["w4"], stability="experimental")
        yield SchemeRecord(name="sick", config="acme:nowhere")

    def w4a8(group_size: int = 32):
        return QLayerConfig(
            weight=QTensorConfig(
                dtype="int4", qscheme="per_group", group_size=group_size, ch_axis=-1, symmetric=False, scale_type="float16"
            ),
            input_tensors=QTensorConfig(dtype="fp8_e4m3", qscheme="per_tensor", is_dynamic=False, symmetric=True),
        )

    @hookimpl
    def quark_register_observers():
        yield ObserverRecord(name="minmax", class_name="AcmeMinMax", observer="acme:MinMax")

    @attrs.define(kw_only=True)
    class Config(AlgoConfig):
        """Settings.

        Attributes:
            share: Of the whole.
        """

        name: str = "whole"
        share: float = 0.5

    class Box:
        """A box.

        Args:
            lid: Whether it has one.
        """

        def __init__(self, lid: bool = True) -> None:
            pass

        def export(self, content, out, options):
            pass

    @hookimpl
    def quark_register_algorithms():
        yield AlgorithmRecord(name="hollow", kind="rounding", config="acme:Config")
        yield AlgorithmRecord(
            name="whole", kind="transform", config=f"{__name__}:Config", processor="acme:Work", stability="provisional",
            capabilities=["calibration", "acme.sparse"], role="rotation", before=["hollow"], after=["equalization", "other"],
        )

    ARCHITECTURE = Architecture(model_type="acme", decoder_blocks="acme.blocks", exclude_layers_name=["head"])

    @hookimpl
    def quark_register_templates():
        yield TemplateRecord(name="acme", architecture=f"{__name__}:ARCHITECTURE")

    @hookimpl
    def quark_register_exporters():
        yield ExporterRecord(name="box", exporter=f"{__name__}:Box", reader=f"{__name__}:Box", quant_methods=("box",))
'''


@pytest.fixture
def catalog(site: Any) -> Catalog:
    site.install("acme-quant", PLUGIN, version="0.1", entry_point="acme")
    site.install("bad-quant", "1 / 0", version="0.3", entry_point="bad")
    site.install("rival-quant", "@hookimpl\ndef quark_register_schemes():\n    yield scheme('good')\n")
    return site.collect()  # type: ignore[no-any-return]


def shown(catalog: Catalog, *arguments: str) -> str:
    """Return the output of a listing command."""
    with using(catalog):
        done = CliRunner().invoke(program(), arguments)
    assert done.exit_code == 0, done.output
    return done.stdout


def row(catalog: Catalog, kind: str, name: str) -> dict[str, Any]:
    report = json.loads(shown(catalog, kind, "--json"))
    return next(r for r in report[kind] if r["name"] == name)


def test_a_scheme_is_shown_with_what_it_does_to_a_layer(catalog: Catalog) -> None:
    found = row(catalog, "schemes", "w4a8")
    facts = {
        key: found[key] for key in ("weight", "input", "output", "effective_bits", "needs_calibration", "aliases", "stability", "status")
    }
    assert facts == {
        "weight": "int4/group 32 asym",
        "input": "fp8_e4m3/tensor static",
        "output": "float",
        "effective_bits": 4 + (16 + 4) / 32,
        "needs_calibration": True,
        "aliases": ["w4"],
        "stability": "experimental",
        "status": "active",
    }
    assert found["source"] == {"distribution": "acme-quant", "version": "0.1", "module": found["source"]["module"], "entry_point": "acme"}
    text = shown(catalog, "schemes")
    for part in ("w4a8", "int4/group 32 asym", "fp8_e4m3/tensor static", "4.625", "needed", "acme-quant 0.1", "experimental"):
        assert part in text


def test_a_scheme_whose_configuration_cannot_be_built_is_listed_all_the_same(catalog: Catalog) -> None:
    found = row(catalog, "schemes", "sick")
    assert "points at 'acme:nowhere', which cannot be loaded" in found["error"]
    assert "acme-quant 0.1" in found["error"]


def test_a_listing_asks_for_each_name_a_few_times_however_many_there_are(site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    site.install(
        "many-quant", "@hookimpl\ndef quark_register_schemes():\n    yield from (scheme(f's{i}', aliases=[f'a{i}']) for i in range(100))"
    )
    catalog = site.collect()
    calls, unreplaced = [0], registry.unreplaced

    def counted(claims: Any) -> Any:
        calls[0] += 1
        return unreplaced(claims)

    monkeypatch.setattr(registry, "unreplaced", counted)
    assert len(kind_report(catalog, "schemes")["schemes"]) == 101
    # Both names of each are looked up for conflicts, and one for its status: two calls each time.
    assert calls[0] <= 3 * 2 * 101


def test_facts_of_the_other_kinds(catalog: Catalog) -> None:
    assert row(catalog, "formats", "int4")["bits"] == 4
    assert row(catalog, "observers", "minmax")["class_name"] == "AcmeMinMax"
    assert row(catalog, "algorithms", "hollow")["configuration_only"] is True
    assert row(catalog, "algorithms", "whole")["configuration_only"] is False
    assert row(catalog, "templates", "acme")["decoder_blocks"] == "acme.blocks"
    assert row(catalog, "exporters", "box")["quant_methods"] == ["box"]
    lines = shown(catalog, "algorithms").splitlines()
    assert [line.split()[0] for line in lines if "configuration only" in line] == ["hollow"]


def test_plugins_are_listed_with_failures_and_conflicts(catalog: Catalog) -> None:
    report = json.loads(shown(catalog, "plugins", "--json"))
    of_core = ("layer_types",)
    assert [(r["distribution"], r["status"], r["provides"]) for r in report["plugins"]] == [
        ("quark-core", "active", {kind: len(catalog.registries[kind]) for kind in of_core}),
        ("acme-quant", "active", {"formats": 2, "observers": 1, "schemes": 2, "algorithms": 2, "templates": 1, "exporters": 1}),
        ("good-quant", "active", {"schemes": 1}),
        ("rival-quant", "active", {"schemes": 1}),
        ("bad-quant", "failed", {}),
    ]
    (failure,) = report["failures"]
    assert (failure["source"]["distribution"], failure["source"]["version"], failure["stage"]) == ("bad-quant", "0.3", "import")
    assert failure["fix"]
    assert [s["distribution"] for s in report["conflicts"]["schemes"]["good"]] == ["good-quant", "rival-quant"]
    text = shown(catalog, "plugins")
    assert "The name 'good' (schemes) is claimed by good-quant 2.5 and rival-quant 1.0. Use good-quant:good or rival-quant:good." in text
    assert "plugin 'bad' of bad-quant 0.3" in text


def test_contested_records_are_listed_under_the_names_that_work(catalog: Catalog) -> None:
    lines = shown(catalog, "schemes").splitlines()
    assert {line.split()[0] for line in lines if "contested" in line} == {"good-quant:good", "rival-quant:good"}


def test_a_plugin_that_is_left_out_is_listed_as_such(site: Any) -> None:
    catalog = site.collect(QUARK_DISABLED_PLUGINS="good-quant")
    assert "left out by QUARK_DISABLED_PLUGINS" in shown(catalog, "plugins")
    assert "No schemes are installed. The built-in ones come with quark-schemes" in shown(catalog, "schemes")


@pytest.mark.parametrize(
    "arguments", [[], ["quantize"], ["schemes", "--help"], ["schemes", "--jsn"], ["schemes", "x", "y"], ["plugins", "x"], ["scheme"]]
)
def test_what_is_not_plainly_a_listing_is_left_to_the_command_line_library(arguments: list[str]) -> None:
    assert not listing.answer(arguments)


@pytest.mark.parametrize("arguments", [["plugins"], ["schemes", "--json"], ["schemes", "w4a8"], ["algorithms", "--json", "whole"]])
def test_a_plain_listing_is_answered_at_once_and_in_the_same_words(
    catalog: Catalog, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with using(catalog):
        assert listing.answer(arguments)
    assert capsys.readouterr().out == shown(catalog, *arguments)


def test_without_any_plugin_the_listing_says_what_to_install(capsys: pytest.CaptureFixture[str]) -> None:
    with using(Catalog()):
        listing.show("plugins")
    out = capsys.readouterr().out
    assert all(f"pip install {name}" in out for name in ("quark-schemes", "quark-algos", "quark-templates", "quark-exporters"))


def test_a_terminal_gets_a_table_that_fits(catalog: Catalog, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    with using(catalog):
        listing.show("schemes")
    lines = re.sub(r"\x1b\[\d*m", "", capsys.readouterr().out.split("The name")[0]).splitlines()
    assert max(map(len, lines)) <= 80
    assert any(line.split()[:1] == ["w4a8"] for line in lines)


@pytest.mark.parametrize(
    ("kind", "name", "option"),
    [
        ("schemes", "w4a8", {"name": "group_size", "type": "int", "default": 32, "required": False, "help": ""}),
        ("schemes", "w4", {"name": "group_size", "type": "int", "default": 32, "required": False, "help": ""}),
        ("algorithms", "whole", {"name": "share", "type": "float", "default": 0.5, "required": False, "help": "Of the whole."}),
        ("exporters", "box", {"name": "lid", "type": "bool", "default": True, "required": False, "help": "Whether it has one."}),
    ],
)
def test_one_record_is_shown_with_its_options(catalog: Catalog, kind: str, name: str, option: dict[str, Any]) -> None:
    report = json.loads(shown(catalog, kind, name, "--json"))
    assert report["options"][0] == option
    assert (report["kind"], report["entry"]["source"]["distribution"]) == (kind, "acme-quant")
    text = shown(catalog, kind, name)
    for part in (option["name"], option["type"], json.dumps(option["default"]), option["help"], "acme-quant 0.1"):
        assert part in text


def test_one_record_is_shown_with_what_it_declares(catalog: Catalog) -> None:
    text = shown(catalog, "algorithms", "whole")
    pairs = dict(re.split(r"  +", line.strip(), maxsplit=1) for line in text.splitlines() if re.match(r"  \S", line) and ":" not in line)
    assert pairs["stability"] == "provisional"
    assert pairs["capabilities"] == "acme.sparse, calibration"
    assert pairs["plugin API"] == "1 to 99"
    assert (pairs["role"], pairs["before"], pairs["after"]) == ("rotation", "hollow", "equalization, other")
    entry = json.loads(shown(catalog, "algorithms", "whole", "--json"))["entry"]
    assert (entry["capabilities"], entry["api"], entry["options"]) == (["acme.sparse", "calibration"], [1, 99], None)


def test_an_exporter_has_the_options_of_every_exporter_too(catalog: Catalog) -> None:
    names = [option["name"] for option in json.loads(shown(catalog, "exporters", "box", "--json"))["options"]]
    assert {"lid", "weight_format", "pack_method", "max_shard_bytes"} <= set(names)
    assert not {"own", "tokenizer"} & set(names)


def test_a_terminal_is_told_what_does_not_fit(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "60")
    with using(catalog):
        listing.show("schemes")
    lines = capsys.readouterr().out.splitlines()
    end = next(i for i, line in enumerate(lines) if line.endswith("--json)"))
    assert all(len(line) <= 60 for line in lines[: end + 1])
    assert "not shown: " in " ".join(lines)
    assert "quark schemes NAME" in " ".join(lines)


CLOSED = """
import errno, sys
from quark_workbench.cli import listing

def closed(*_: object, **__: object) -> None:
    print("a line that nobody takes")
    raise OSError(getattr(errno, sys.argv[1]), "the pipe is closed")

listing.show = closed
print(listing.answer(["plugins"]), file=sys.stderr)
"""


@pytest.mark.parametrize("number", ["EPIPE", "EINVAL"])
def test_a_listing_ends_quietly_if_nobody_reads_on(number: str) -> None:
    done = subprocess.run([sys.executable, "-c", CLOSED, number], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (0, "True\n")
    done = subprocess.run([sys.executable, "-c", CLOSED, "EACCES"], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1
