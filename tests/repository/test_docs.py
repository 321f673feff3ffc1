"""The pages of docs/ are true: their code runs, their commands run on the tiny model, and their generated parts can be made."""

from __future__ import annotations

import importlib.util
import re
import shlex
import shutil
import sys
import tomllib
import types
from collections.abc import Iterator
from contextlib import ExitStack
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from quark.plugins import Catalog, Source, using
from quark.plugins.discovery import Candidate, discover
from quark_devkit.catalogue import all_checks, checks_of
from quark_tiny_model import held_out_text, tiny_model, tiny_model_dir
from quark_workbench.cli import listing
from quark_workbench.cli.main import program
from tests.kit.media_models import HEARING, media_checkpoint, write_images, write_sounds
from tools.docs.sections import new_plugin_file

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
FENCE = re.compile(r'^(<!-- not run: [^\n]+ -->\n+)?```(\w+)(?: title="([^"]+)")?\n(.*?)^```', flags=re.MULTILINE | re.DOTALL)
NEW_PLUGIN = re.compile(r"^\{\{ new_plugin (\w+) (\S+) \}\}$", flags=re.MULTILINE)
LONGEST_LINE = 100
SLOW_CHECKS = re.compile(r"^\$ quark check .*--kind (rounding|transform|block_tuning|branch|template)$", flags=re.MULTILINE)
TUTORIAL = ROOT / "docs/plugins/tutorial.md"
MEDIA_MODELS = {"speech-model": "WhisperForConditionalGeneration", "vision-model": "LlavaForConditionalGeneration"}
"""Models that see or hear in commands, and the class of the tiny model of each."""


class Block(NamedTuple):
    """A block of code of a page."""

    is_run: bool
    language: str
    title: str
    code: str


def blocks(page: Path, *, generated: bool = True) -> list[Block]:
    """The blocks of a page, by default with those that show what `quark new-plugin` writes."""
    text = page.read_text(encoding="utf-8")
    if generated:
        text = NEW_PLUGIN.sub(lambda m: new_plugin_file(m[1], m[2]), text)
    return [Block(not m[1], m[2], m[3] or "", m[4]) for m in FENCE.finditer(text)]


def named(page: Path) -> str:
    return str(page.relative_to(ROOT / "docs"))


RUNNABLE = [page for page in PAGES if any(block.language in ("python", "console") for block in blocks(page))]


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder with the texts that commands name, in which nothing of the example distribution is imported yet."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "texts").mkdir()
    for path in ("text.txt", "texts/one.txt"):
        (tmp_path / path).write_text(held_out_text(), encoding="utf-8")
    for name in [name for name in sys.modules if name.partition(".")[0] == "acme_quant"]:
        monkeypatch.delitem(sys.modules, name)
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] == "acme_quant"]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of the first block of the tiny model, for commands that take one."""
    directory = tmp_path_factory.mktemp("model") / "tiny"
    shutil.copytree(tiny_model_dir(), directory, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    tiny_model(torch.bfloat16, blocks=1).save_pretrained(directory)  # type: ignore[operator]
    return directory


def install(page: Path, folder: Path, stack: ExitStack) -> None:
    """Write the files of a page's distribution, or of the tutorial's, and have its plugin be there as if it were installed."""
    files = {block.title: block.code for block in blocks(page) if block.title}
    if not files and "acme-quant" in page.read_text(encoding="utf-8"):
        files = {block.title: block.code for block in blocks(TUTORIAL) if block.title}
    points = {"acme": "acme_quant.plugin"}
    if "pyproject.toml" in files:
        points = tomllib.loads(files["pyproject.toml"])["project"]["entry-points"]["quark"]
    modules = {path: code for path, code in files.items() if path.endswith(".py")}
    if not modules:
        return
    for path, code in {"acme_quant/__init__.py": "", **modules}.items():
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_text(code, encoding="utf-8")
    importlib.invalidate_caches()
    others = [candidate for candidate in discover() if candidate.source.distribution != "acme-quant"]
    own = [Candidate(Source("acme-quant", "0.1.0", module, name), EntryPoint(name, module, "quark")) for name, module in points.items()]
    catalog = stack.enter_context(using(Catalog((*others, *own))))
    assert catalog.failures() == ()


@pytest.mark.documents
@pytest.mark.parametrize("page", RUNNABLE, ids=named)
def test_the_code_and_the_commands_of_a_page_run_in_order(page: Path, workplace: Path, model: Path) -> None:
    run_page(page, workplace, model)


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in RUNNABLE if SLOW_CHECKS.search(page.read_text(encoding="utf-8"))], ids=named)
def test_the_algorithms_and_templates_of_pages_pass_all_checks(page: Path, workplace: Path, model: Path) -> None:
    run_page(page, workplace, model, is_slow=True)


def run_page(page: Path, workplace: Path, model: Path, *, is_slow: bool = False) -> None:
    """Run the blocks of a page in order; conformance checks that quantize models many times only where it may be slow."""
    module = types.ModuleType("page")
    with ExitStack() as stack:
        install(page, workplace, stack)
        for block in blocks(page):
            code = block.code.replace("path/to/model", str(model if block.language == "console" else tiny_model_dir()))
            if not block.is_run or block.title:
                continue
            if block.language == "console":
                code = "\n".join(with_media_models(code.splitlines(), workplace))
            if block.language == "python":
                exec(compile(code, named(page), "exec"), module.__dict__)
            if block.language == "console":
                for line in code.splitlines():
                    if is_slow or not SLOW_CHECKS.match(line):
                        run_command(line)


def with_media_models(lines: list[str], workplace: Path) -> list[str]:
    """Return the lines of a console with tiny models that see or hear, whose data are written; without Pillow, no line with images."""
    if importlib.util.find_spec("PIL") is None:
        lines = [line for line in lines if "vision" not in line]
    for name, kind in MEDIA_MODELS.items():
        if any(f"path/to/{name}" in line for line in lines) and not (workplace / name).exists():
            media_checkpoint(kind, workplace / name)
            (write_sounds if kind in HEARING else write_images)(workplace)
    return [line.replace("path/to/speech", "speech").replace("path/to/vision", "vision") for line in lines]


def run_command(line: str) -> None:
    """Run a line of a console: commands of quark on few tokens; of others, see that what they name is there."""
    assert line.startswith("$ "), f"a command is written after a prompt: {line}"
    name, *arguments = shlex.split(line.removeprefix("$ "))
    if name == "quark":
        run_quark(arguments)
    elif name == "make":
        assert re.search(rf"^{arguments[0]}:", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    elif (name, *arguments[:3]) == ("python", "-m", "vllm.entrypoints.openai.api_server", "--model"):
        assert (Path(arguments[3]) / "config.json").is_file(), f"{line}: no command before it has written {arguments[3]}"
    elif name == "python":
        assert arguments[0] == "-m"
        assert importlib.util.find_spec(arguments[1]) is not None
    else:
        known = {("source", ".venv/bin/activate"), ("pip", "install", "-e"), ("pytest", "--quark-conformance", "acme-quant")}
        assert (name, *arguments[:2]) in known, f"{line}: nothing checks it"


def run_quark(arguments: list[str]) -> None:
    if listing.answer(arguments):
        return
    if arguments[0] == "demo":
        return  # tests/integration/test_demo.py runs it
    if arguments[0] == "check" and not checks_of(arguments[arguments.index("--kind") + 1]):
        return  # nothing is checked of this kind yet
    few = ["--num-calib", "4", "--seq-len", "64"] if "--calib" in arguments else []
    few += ["--limit", "2", "--seq-len", "64"] if arguments[0] == "evaluate" else []
    program()([*arguments, *few], standalone_mode=False)


def test_expected_failures_that_pages_show_are_of_checks_that_there_are() -> None:
    shown = [tomllib.loads(block.code) for page in PAGES for block in blocks(page) if block.language == "toml"]
    tables = [table["tool"]["quark"]["conformance"]["expected-failures"] for table in shown if "quark" in table.get("tool", {})]
    checks = {":".join(key.split(":")[::2]) for table in tables for key in table}  # kind:subject:check
    assert checks
    assert checks <= {*all_checks()}


def test_only_a_block_with_a_reason_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text(
        "<!-- not run: needs a GPU -->\n```python\na\n```\n\n```console\n$ b\n```\n<!-- not run: -->\n```text\nc\n```\n"
    )
    assert [(block.is_run, block.language) for block in blocks(tmp_path / "a.md")] == [(False, "python"), (True, "console"), (True, "text")]


def test_there_are_pages_with_code() -> None:
    assert len(RUNNABLE) >= 15


def test_a_command_that_does_not_work_is_noticed(workplace: Path) -> None:
    with pytest.raises(Exception, match="no_such_scheme"):
        run_command(f"$ quark quantize {tiny_model_dir()} out --scheme no_such_scheme")
    with pytest.raises(AssertionError, match="nothing checks it"):
        run_command("$ curl something")
    with pytest.raises(AssertionError, match="has written"):
        run_command("$ python -m vllm.entrypoints.openai.api_server --model nowhere")


def test_code_is_in_a_language_and_fits_the_page() -> None:
    defects = []
    for page in PAGES:
        fences = re.findall(r"^ *```.*$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
        if len(fences) != 2 * len(blocks(page, generated=False)):
            defects.append(f"{named(page)}: a fence is not closed, or is indented")
        for block in blocks(page, generated=False):
            if block.language not in {"python", "console", "toml", "text", "json"}:
                defects.append(f"{named(page)}: code in {block.language}")
            if block.language == "python":
                defects += [f"{named(page)}: {line}" for line in block.code.splitlines() if len(line) > LONGEST_LINE]
    assert defects == []


def test_every_page_has_one_title_and_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    texts = {page: FENCE.sub("", page.read_text(encoding="utf-8")) for page in PAGES}
    titles = {named(page): re.findall(r"^# .+$", text, flags=re.MULTILINE) for page, text in texts.items()}
    assert {name: found for name, found in titles.items() if len(found) != 1} == {}
    assert [named(page) for page, text in texts.items() if not text.startswith("# ")] == []
    assert [named(page) for page in PAGES if f": {named(page)}\n" not in navigation] == []
