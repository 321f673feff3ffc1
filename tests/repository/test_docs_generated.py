"""The generated parts of the documentation are complete: everything that is registered, every option, every public name."""

from __future__ import annotations

import inspect
import json
import re
from importlib import import_module
from pathlib import Path
from xml.etree import ElementTree

import attrs
import pytest

import quark.plugins
from benchmarks.results import Measurement, add_run
from quark.plugins import QuarkHooks, formats
from quark.plugins.catalog import catalog
from quark.plugins.events import EVENTS
from quark.plugins.registries import KINDS
from quark_devkit.new_plugin import PLUGIN_KINDS
from quark_devkit.new_plugin.distribution import Naming, rendered
from quark_workbench.cli.commands import typer_command
from quark_workbench.cli.listing_commands import LISTINGS
from tools.docs import api, benchmark_page, command_line, events, manual, marks, measured, pictures, sections, sessions, tables
from tools.docs.pictures.formats import values_of
from tools.plugin_api.names import imports_of

ROOT = Path(__file__).resolve().parents[2]
PAGES = {str(p.relative_to(ROOT / "docs")): p.read_text(encoding="utf-8") for p in sorted((ROOT / "docs").rglob("*.md"))}


def test_the_marks_of_pages_stand_for_something() -> None:
    expanded = {page: marks.expand(text, page) for page, text in PAGES.items()}
    assert [page for page, text in expanded.items() if "{{" in re.sub(r"```.*?```", "", text, flags=re.DOTALL)] == []
    assert [page for page, text in expanded.items() if len(text) < len(PAGES[page])] == []


def test_an_unknown_mark_is_an_error_that_names_the_page() -> None:
    with pytest.raises(ValueError, match=r"docs/index\.md: '\{\{ tabel schemes \}\}' is not a mark: write one of table"):
        marks.expand("{{ tabel schemes }}", "index.md")


def public_names() -> set[str]:
    """The names that pages of the Python API list, and the names that any other page documents."""
    listed = {f"{module}.{name}" for module in api.PUBLIC for name in import_module(module).__all__}
    return listed | {name for text in PAGES.values() for name in re.findall(r"^::: ([\w.]+)$", text, flags=re.MULTILINE)}


def sources_for_plugin_authors() -> dict[str, str]:
    """Code that a plugin author copies: of the pages, of what `quark new-plugin` writes, of the example distribution."""
    sources: dict[str, str] = {}
    for page in (page for page in PAGES if page.startswith("plugins/")):
        code = re.findall(r"^```python[^\n]*\n(.*?)^```", marks.expand(PAGES[page], page), flags=re.MULTILINE | re.DOTALL)
        sources |= {f"{page}, block {number}": text for number, text in enumerate(code, 1)}
    written = rendered(Naming.of("acme-quant"), PLUGIN_KINDS)
    sources |= {f"new-plugin: {path}": text for path, text in written.items() if path.endswith(".py")}
    return sources | {str(p.relative_to(ROOT)): p.read_text(encoding="utf-8") for p in (ROOT / "examples/acme_quant/src").rglob("*.py")}


def test_code_for_plugin_authors_imports_public_names_only() -> None:
    public, sources = public_names(), sources_for_plugin_authors()
    assert len(sources) > 50
    private = {
        f"{where}: {module}.{name}"
        for where, code in sources.items()
        for module, name in imports_of(code)
        if f"{module}.{name}" not in public and not module.startswith("quark.torch.")  # the import paths of AMD Quark
    }
    assert private == set()


def test_a_private_name_is_none_of_the_public_ones() -> None:
    public = public_names()
    assert {"quark.checkpoint.stored_tensors", "quark.models.plan.quant_plan.QuantPlan", "quark.algorithms.Validation"} <= public
    private = ("quark.models.hf.internals.source_of", "quark.config.fields.checked", "quark.checkpoint.destination.COMPANIONS")
    assert not public & set(private)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.plural)
def test_the_table_of_a_kind_is_on_a_page_and_has_every_record(kind) -> None:  # type: ignore[no-untyped-def]
    assert any(f"{{{{ table {kind.plural} }}}}" in text for text in PAGES.values())
    rows = tables.table_of(kind.plural).splitlines()[2:]
    registry = catalog().registries[kind.plural]
    assert [re.match(r"\| `([^`]+)`", row)[1] for row in rows] == registry.names()  # type: ignore[index]


@pytest.mark.parametrize("kind", ["schemes", "algorithms", "observers", "exporters"])
def test_every_option_of_a_record_is_explained(kind: str) -> None:
    text = tables.options_of(kind)
    for record in catalog().registries[kind]:
        options = [] if kind == "exporters" else catalog().registries[kind].options(record.name)
        section = text.partition(f"### Options of {record.name}\n")[2].partition("\n### ")[0]
        assert {f"| `{option.name}` |" in section for option in options} <= {True}
    if kind == "exporters":
        assert "`max_shard_bytes`" in text


def test_text_of_a_record_cannot_become_markup() -> None:
    assert tables.cell("<script>*x*</script> | [a](b)\n# c `d`") == (r"&lt;script&gt;\*x\*&lt;/script&gt; \| \[a\](b) # c \`d\`")
    assert tables.code("a`b|c") == r"`a'b\|c`"


def test_every_command_and_option_of_the_program_is_in_the_reference() -> None:
    text = command_line.reference()
    commands = {name: typer_command(name) for name in [*LISTINGS, *catalog().commands.names()]}
    assert len(commands) >= 10
    for name, command in commands.items():
        section = text.partition(f"## quark {name}\n")[2].partition("\n## ")[0]
        assert all(f"`{flag}" in section for p in command.params for flag in p.opts if flag.startswith("--")), name


def test_every_hook_has_a_page_with_its_example() -> None:
    hooks = [name for name in dir(QuarkHooks) if name.startswith("quark_")]
    for name in hooks:
        assert any(f"{{{{ hook {name} }}}}" in text for text in PAGES.values()), name
        assert 'title="acme_quant/plugin.py"' in manual.hook(name)
        assert (inspect.getdoc(getattr(QuarkHooks, name)) or "").partition(".")[0].replace("``", "`") in manual.hook(name)


def test_every_record_class_is_described_on_a_page_of_a_plugin() -> None:
    described = {identifier for page, text in PAGES.items() for identifier in re.findall(r"^::: (\S+)", text, flags=re.MULTILINE)}
    records = [name for name in quark.plugins.__all__ if name.endswith("Record")]
    assert {f"quark.plugins.{name}" for name in records} <= described


def test_every_public_name_is_described_once_or_linked() -> None:
    by_hand = [i for text in PAGES.values() for i in re.findall(r"^::: (\S+)", text, flags=re.MULTILINE)]
    generated = [i for page in api.pages() for i in re.findall(r"^::: (\S+)", page.markdown, flags=re.MULTILINE)]
    assert len({*by_hand, *generated}) == len(by_hand) + len(generated)
    for page in api.pages():
        module = __import__(page.title, fromlist=["__all__"])
        for name in module.__all__:
            assert f"::: {page.title}.{name}\n" in f"{page.markdown}\n" or f"[`{name}`](" in page.markdown, f"{page.title}.{name}"


def test_a_section_keeps_only_links_that_lead_somewhere() -> None:
    text = sections.section("ARCHITECTURE.md: The folders of the core, bottom to top", "explanation/one-run.md")
    assert "`CONTRIBUTING.md`" in text
    assert "](CONTRIBUTING.md" not in text
    with pytest.raises(ValueError, match=r"docs/a\.md: ARCHITECTURE\.md has no heading 'No such'"):
        sections.section("ARCHITECTURE.md: No such", "a.md")


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_a_picture_is_drawn_and_can_stand_in_a_page(name: str) -> None:
    figure = pictures.figure(name, "What < it shows")
    assert "\n" not in figure
    svg = ElementTree.fromstring(figure).find("{http://www.w3.org/2000/svg}svg")
    assert svg is not None
    assert len(svg) > 10
    width = float(svg.attrib["viewBox"].split()[2])
    assert all(0 <= float(text.attrib["x"]) <= width for text in svg.iter("{http://www.w3.org/2000/svg}text"))


def test_recorded_pictures_need_no_page_around_them_and_no_other_host() -> None:
    folder = ROOT / "docs/pictures"
    texts = {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.svg")}
    assert {f"{name}.svg" for name in sessions.SESSIONS} <= texts.keys()
    for text in texts.values():
        ElementTree.fromstring(text)
        assert not {"url(http", "@import", "var(--"} & set(re.findall(r"url\(http|@import|var\(--", text))
    report = (folder / "report.html").read_text(encoding="utf-8")
    assert {name: sessions.plot(report, name) for name in sessions.PLOTS} == {n: texts[f"report-{n}.svg"] for n in sessions.PLOTS}


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("int2", [-2, -1, 0, 1]),
        ("int4", list(range(-8, 8))),
        ("uint4", list(range(16))),
        ("fp4", [-6, -4, -3, -2, -1.5, -1, -0.5, 0, 0.5, 1, 1.5, 2, 3, 4, 6]),
    ],
)
def test_the_values_of_a_number_line_are_those_of_the_format(name: str, values: list[float]) -> None:
    assert values_of(formats().load_format(name)) == values


def test_measured_accuracy_is_of_schemes_that_there_are_and_says_which_are_missing() -> None:
    data, names = measured.round_to_nearest(), set(quark.plugins.schemes().names())
    perplexity, refused = data["perplexity"], data["refused"]
    assert perplexity.keys() - {"float"} <= names
    assert refused.keys() <= names - perplexity.keys()
    assert len(perplexity) >= 25
    table, _, missing = measured.table().partition("Not measured: ")
    assert {name for name in names if f"`{name}`" not in table} == set(re.findall(r"`(\w+)`", missing))


def test_the_table_by_scheme_of_the_algorithms_has_the_measured_figures() -> None:
    accuracy = measured.calibrated()
    readme = (sections.ROOT / "plugins/quark_algos/README.md").read_text(encoding="utf-8")
    lines = re.search(r"^(\| \| int4_wo_64 .*?)(?:\n\n)", readme, flags=re.MULTILINE | re.DOTALL)
    assert lines is not None
    titles, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1].splitlines()]
    names = {"round-to-nearest": "none", "GPTQ": "gptq", "GPTAQ": "gptaq", "Qronos": "qronos"}
    assert [row[0] for row in rows] == list(names)
    for row in rows:
        figures = [accuracy[names[row[0]]].get(scheme) for scheme in titles[1:]]
        assert row[1:] == ["" if one is None else f"{one['perplexity']:.2f}, {one['mean_kl']:.3f}" for one in figures]
    assert len(titles) > 5


def test_the_page_of_benchmarks_has_every_figure_of_the_last_run_and_a_line_for_each_run(tmp_path: Path) -> None:
    path = tmp_path / "benchmarks.json"
    path.write_text('{"runs": []}', encoding="utf-8")
    assert benchmark_page.page(path) == "No run has been recorded yet."
    add_run(path, [Measurement("start-up", "a|b", 2.0, "×", "import x", 3.0)])
    add_run(path, [Measurement("start-up", "a|b", 4.0, "×", "import x", 3.0), Measurement("start-up", "c", 0.25, "s", "import x", 0.3)])
    add_run(
        path, [Measurement("accuracy", "x", 33.9, "perplexity", "float", 33.8), Measurement("divergence", "x", 0.1234, "nats", "float")]
    )
    assert "| x | 33.90 | 33.8 perplexity, missed |" in benchmark_page.page(path)
    assert "| case | KL, nats |" in benchmark_page.page(path)
    runs = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({"runs": runs["runs"][:-1]}), encoding="utf-8")
    text = benchmark_page.page(path)
    assert "| a\\|b | 4.00× | 3 ×, missed |" in text
    assert "| c | +0.25 s | 0.3 s, met |" in text
    assert [line.split("|")[-2].strip() for line in text.splitlines()[-2:]] == ["4.00", "2.00"]


def test_every_event_and_every_field_of_it_has_a_meaning_on_the_page() -> None:
    text = events.events()
    for kind in EVENTS:
        section = text.split(f"### {kind.name}\n")[1].partition("### ")[0]
        for field in attrs.fields(kind):
            if field.name not in ("task", "elapsed"):
                (row,) = [line for line in section.splitlines() if line.startswith(f"| `{field.name}` |")]
                assert len(row.split("|")[2].strip()) > 5
