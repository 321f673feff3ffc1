"""A generated distribution is small, whole, formatted, typed, and registers the chosen kinds."""

from __future__ import annotations

import ast
import io
import subprocess
import sys
import tokenize
import tomllib
from pathlib import Path

import pytest

import quark_devkit.new_plugin
from quark.base.version import VERSION
from quark.errors import ConfigError, OutputError
from quark.plugins import Catalog
from quark.plugins.discovery import normalized
from quark_devkit.new_plugin import PLUGIN_KINDS, PluginKind, new_distribution
from quark_devkit.new_plugin.distribution import Naming

from .conftest import KINDS, NAME, PLUGINS, candidates

PACKAGE = "lumen_quant"
FILES = {
    ".github/workflows/ci.yml",
    ".gitignore",
    "README.md",
    "pyproject.toml",
    f"src/{PACKAGE}/__init__.py",
    f"src/{PACKAGE}/plugin.py",
    f"src/{PACKAGE}/py.typed",
    "tests/test_conformance.py",
}
MODULES = {
    "scheme": {"w4a8.py"},
    "format": {"int3.py"},
    "vector": {"pairs.py", "pairs_g32.py"},
    "observer": {"quantile.py"},
    "selector": {"ends.py"},
    "rounding": {"clipped.py", "clipped_settings.py"},
    "transform": {"balanced.py", "balanced_settings.py"},
    "block_tuning": {"nudged.py", "nudged_settings.py"},
    "branch": {"channels.py", "channels_settings.py"},
    "template": {"lm.py", "modeling.py"},
    "layout": {"box.py"},
    "layer_type": {"gated.py"},
    "dataset": {"dialogs.py"},
    "metric": {"rank.py"},
    "quant_mode": {"whole.py"},
    "graph_op": {"mish.py"},
}
BARS = {"scheme": 15, "format": 40, "rounding": 40}
"""Most lines of code of a plugin of that kind, besides what registers and packages it."""


def written(directory: Path) -> set[str]:
    return {path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file() and "__pycache__" not in path.parts}


def code_lines(text: str) -> int:
    """Lines that hold code: no blank ones, comments or docstrings."""
    tree = ast.parse(text)
    documented = [node for node in ast.walk(tree) if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)]
    docstrings = [node.body[0] for node in documented if ast.get_docstring(node) is not None]
    prose = {line for node in docstrings for line in range(node.lineno, (node.end_lineno or 0) + 1)}
    silent = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    tokens = [token for token in tokenize.generate_tokens(io.StringIO(text).readline) if token.type not in silent]
    return len({line for token in tokens for line in range(token.start[0], token.end[0] + 1)} - prose)


def tool(*arguments: str | Path, where: Path) -> None:
    done = subprocess.run([sys.executable, "-m", *map(str, arguments)], check=False, cwd=where, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_lines_of_code_are_counted_without_prose() -> None:
    assert code_lines('"""Doc."""\n\n# comment\nx = (\n    1\n)\ndef f():\n    """Doc.\n\n    More.\n    """\n    return 1  # why\n') == 5


@pytest.mark.parametrize("kind", PLUGIN_KINDS, ids=lambda kind: kind.name)
def test_one_kind_alone_is_a_whole_distribution_that_registers_it(
    kind: PluginKind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"{kind.name.replace('_', '-')}-sample"  # a package of its own: modules stay imported
    package = name.replace("-", "_")
    directory = new_distribution(name, [kind.name], tmp_path / "out")
    own = {f"src/{package}/{module}" for module in MODULES[kind.name]}
    assert written(directory) == {file.replace(PACKAGE, package) for file in FILES} | own
    monkeypatch.syspath_prepend(str(directory / "src"))
    catalog = Catalog(candidates(directory))
    assert catalog.failures() == ()
    claims = {
        plural: [c.record for c in registry.claims() if c.source.distribution == name] for plural, registry in catalog.registries.items()
    }
    assert {plural: len(records) for plural, records in claims.items() if records} == {plugin.registry: 1 for plugin in kind.plugins}
    assert catalog.unstated() == ()
    test = (directory / "tests" / "test_conformance.py").read_text(encoding="utf-8")
    for plugin in kind.plugins:
        (record,) = claims[plugin.registry]
        assert record.name == f"{Naming.of(name).prefix}_{plugin.ending}"
        assert record.summary
        assert f'({plugin.conformance}):\n    subject = "{record.name}"\n' in test
    assert f'(DistributionConformance):\n    subject = "{name}"\n' in test


def test_all_kinds_go_into_one_distribution(everything: Path, installed: Catalog) -> None:
    assert written(everything) == FILES | {f"src/{PACKAGE}/{module}" for modules in MODULES.values() for module in modules}
    names = [c.record.name for registry in installed.registries.values() for c in registry.claims() if c.source.distribution == NAME]
    assert sorted(names) == sorted(f"lumen_{kind.ending}" for kind in PLUGINS)


def test_its_plugin_imports_no_torch(everything: Path) -> None:
    records = "[list(f()) for name, f in vars(plugin).items() if name.startswith('quark_')]"
    code = f"import sys; import {PACKAGE}.plugin as plugin; {records}; print(*sys.modules)"
    path = {"PYTHONPATH": ":".join([str(everything / "src"), *sys.path])}
    loaded = subprocess.run([sys.executable, "-c", code], env=path, capture_output=True, text=True, check=True).stdout.split()
    assert f"{PACKAGE}.plugin" in loaded
    assert not {"torch", "transformers", "numpy"} & set(loaded)


def test_what_it_requires_is_bounded_and_all_that_it_imports(everything: Path) -> None:
    project = tomllib.loads((everything / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert f"quark-core>={VERSION},<2" in project["dependencies"]
    required = {requirement.partition(">")[0] for requirement in project["dependencies"]}
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in (everything / "src").rglob("*.py")]
    froms = {node.module or "" for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    plain = {alias.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported = {module.partition(".")[0] for module in froms | plain} - sys.stdlib_module_names - {PACKAGE}
    assert {"quark-core" if module == "quark" else normalized(module) for module in imported} <= required


@pytest.mark.parametrize("kinds", [[kind] for kind in KINDS] + [["rounding", "transform"], KINDS], ids="+".join)
@pytest.mark.parametrize("name", [NAME, "q", "a-company-with-a-long-name-quant"])
def test_every_file_is_formatted_and_free_of_lint(kinds: list[str], name: str, tmp_path: Path) -> None:
    directory = new_distribution(name, kinds, tmp_path / name)
    tool("ruff", "format", "--check", "--no-cache", ".", where=directory)
    tool("ruff", "check", "--no-cache", ".", where=directory)
    strict = "E,F,W,UP,B,C4,SIM,PT,PLE,PLW,RUF100,D101,D103,D104"
    ignored = [] if name == NAME else ["--ignore", "E501"]  # prose in docstrings is not wrapped anew for a longer name
    tool("ruff", "check", "--no-cache", "--extend-select", strict, *ignored, "src", where=directory)


@pytest.mark.slow  # half a minute, most of it for types of torch
def test_it_passes_mypy_in_strict_mode(everything: Path, request: pytest.FixtureRequest) -> None:
    cache = request.config.cache.mkdir("mypy-new-plugin") if getattr(request.config, "cache", None) else everything / ".mypy_cache"
    tool("mypy", "--strict", "--cache-dir", cache, where=everything)


@pytest.mark.parametrize("kind", BARS)
def test_a_first_plugin_is_short(kind: str, everything: Path) -> None:
    package = everything / "src" / PACKAGE
    assert sum(code_lines((package / module).read_text(encoding="utf-8")) for module in MODULES[kind]) <= BARS[kind]


@pytest.mark.parametrize("text", ["README.md", ".github/workflows/ci.yml", "pyproject.toml", ".gitignore"])
def test_no_placeholder_is_left(text: str, everything: Path) -> None:
    written = (everything / text).read_text(encoding="utf-8")
    assert "$" not in written.replace("${{ matrix.python }}", "")
    assert NAME in written or text == ".gitignore"


def test_the_code_in_the_readme_runs(everything: Path, installed: Catalog) -> None:
    blocks = (everything / "README.md").read_text(encoding="utf-8").split("```python\n")[1:]
    assert len(blocks) == 2
    for block in blocks:
        exec(block.partition("```")[0], {})


def test_the_readme_begins_with_the_things_that_it_registers(tmp_path: Path) -> None:
    out = new_distribution(NAME, ["block_tuning", "format", "observer"], tmp_path / "out")
    assert (out / "README.md").read_text(encoding="utf-8").startswith(f"# {NAME}\n\nA format, an observer and a block tuning for quark. ")


def test_the_readme_says_that_the_license_is_the_authors_to_choose(everything: Path) -> None:
    assert "Choose a license" in (everything / "README.md").read_text(encoding="utf-8")
    project = tomllib.loads((everything / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert "license" not in project


def test_a_directory_that_is_not_empty_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(OutputError, match="is not empty: choose another"):
        new_distribution(NAME, ["scheme"], tmp_path)
    with pytest.raises(OutputError, match="is a file"):
        new_distribution(NAME, ["scheme"], tmp_path / "mine.txt")
    assert written(tmp_path) == {"mine.txt"}


def test_an_empty_directory_is_used_and_by_default_one_of_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    assert (new_distribution(NAME, ["scheme"], tmp_path / "empty") / "pyproject.toml").is_file()
    monkeypatch.chdir(tmp_path)
    assert new_distribution("Lumen_Quant", ["scheme"]) == Path("lumen-quant")
    assert (tmp_path / "lumen-quant" / "pyproject.toml").is_file()


def test_what_cannot_be_written_is_said_before_anything_is(tmp_path: Path) -> None:
    for kinds, message in (([], "choose at least one of --scheme"), (["scheme", "shceme"], "no kind of plugin 'shceme'")):
        with pytest.raises(ConfigError, match=message):
            new_distribution(NAME, kinds, tmp_path / "out")
    with pytest.raises(ConfigError, match="is not a distribution name"):
        new_distribution("no name", ["scheme"], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_every_folder_of_templates_is_a_kind() -> None:
    folders = {path.name for path in (Path(quark_devkit.new_plugin.__file__).parent / "templates").iterdir()}
    assert folders == {*(kind.name for kind in PLUGINS), "distribution"}
