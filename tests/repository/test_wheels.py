"""The wheels: what they hold and say of themselves, that documented commands install them, and that they work without this checkout."""

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from collections.abc import Iterator
from email.message import Message
from email.parser import Parser
from glob import glob
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tools.neighbours import CPU_TORCH

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).resolve().parents[2]
DISTRIBUTIONS = [
    "core",
    *sorted(f"plugins/{p.parent.name}" for p in ROOT.glob("plugins/*/pyproject.toml")),
    "workbench",
    "tiny_model",
    "devkit",
]
DOCUMENTS = ("README.md", "docs/how-to/install.md", "core/README.md")
PIP = re.compile(r"^(?:\$ )?pip (install .*?)(?:  +#.*)?$", flags=re.MULTILINE)
OURS = re.compile(r"(__editable__|_?_?quark|acme)", flags=re.IGNORECASE)


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The wheel of each distribution, built from copies of the files that git tracks, by its folder."""
    out = tmp_path_factory.mktemp("wheels")
    copies = {folder: out / "sources" / folder for folder in DISTRIBUTIONS}
    for folder, copy in copies.items():
        listed = subprocess.run(
            ["git", "ls-files", "-co", "--exclude-standard", "--", "."], cwd=ROOT / folder, check=True, capture_output=True, text=True
        ).stdout.splitlines()
        for name in (n for n in listed if not n.startswith("tests/") and (ROOT / folder / n).is_file()):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes((ROOT / folder / name).read_bytes())
    offline = ("--no-deps", "--no-build-isolation", "--no-index")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", *offline, "-w", str(out), *map(str, copies.values())]
    subprocess.run(command, check=True, capture_output=True)
    names = {
        folder: tomllib.loads((copy / "pyproject.toml").read_text(encoding="utf-8"))["project"]["name"] for folder, copy in copies.items()
    }
    built = {str(metadata(wheel)["Name"]): wheel for wheel in out.glob("*.whl")}
    assert sorted(built) == sorted(names.values())
    return {folder: built[name] for folder, name in names.items()}


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode("utf-8"))


@pytest.mark.parametrize("folder", DISTRIBUTIONS)
def test_a_wheel_carries_the_licence_and_says_what_it_is(wheels: dict[str, Path], folder: str) -> None:
    with zipfile.ZipFile(wheels[folder]) as archive:
        (licence,) = (n for n in archive.namelist() if n.endswith(".dist-info/licenses/LICENSE"))
        assert archive.read(licence) == (ROOT / "LICENSE").read_bytes()
    said = metadata(wheels[folder])
    assert said["License-Expression"] == "MIT"
    assert said["License-File"] == "LICENSE"
    assert said["Author"] or said["Author-email"]
    assert said.get_all("Project-URL")
    classifiers = said.get_all("Classifier") or []
    assert "Typing :: Typed" in classifiers
    assert {f"Programming Language :: Python :: 3.{minor}" for minor in (11, 12, 13)} <= set(classifiers)


@pytest.mark.parametrize("folder", DISTRIBUTIONS)
def test_a_wheel_holds_every_file_of_its_package(wheels: dict[str, Path], folder: str) -> None:
    source = ROOT / folder / "src"
    files = {p.relative_to(source).as_posix() for p in source.rglob("*") if p.is_file() and "__pycache__" not in p.parts}
    wanted = {f for f in files if ".egg-info/" not in f and not f.endswith(".md")}
    with zipfile.ZipFile(wheels[folder]) as archive:
        held = {n for n in archive.namelist() if ".dist-info/" not in n}
    assert wanted - held == set()
    assert {n for n in held - wanted if not n.endswith(".md")} == set(), "nothing but the package"


@pytest.fixture(scope="module")
def installed(wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a fresh environment with the wheels, which sees third-party packages and nothing of this checkout.

    The site-packages of this interpreter are on its path by name: ``.pth`` files in there, which editable
    installs use, are not read.
    """
    place = tmp_path_factory.mktemp("installed") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(place)], check=True)
    own = Path(sysconfig.get_path("purelib", vars={"base": str(place), "platbase": str(place)}))
    for wheel in wheels.values():
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(own)
    shared = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (own / "third_party.pth").write_text("\n".join(sorted(shared)), encoding="utf-8")
    return place / "bin" / "python"


def run(python: Path, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    own = {"PYTHONPATH", "PYTHONHOME", "QUARK_PLUGINS", "QUARK_DISABLED_PLUGINS"}
    environment = {k: v for k, v in os.environ.items() if k not in own} | {"QUARK_STRICT_PLUGINS": "1"}
    done = subprocess.run([str(python), *arguments], cwd=cwd, env=environment, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def test_each_wheel_depends_only_on_wheels_of_this_repository_and_the_core_on_none(wheels: dict[str, Path]) -> None:
    required = {
        folder: [r for r in metadata(wheel).get_all("Requires-Dist") or [] if "extra ==" not in r] for folder, wheel in wheels.items()
    }
    assert not any(requirement.startswith("quark-") for requirement in required["core"])
    own = {folder: [Requirement(r).name for r in texts if r.startswith("quark-")] for folder, texts in required.items()}
    assert own["workbench"] == ["quark-core"]
    assert own["tiny_model"] == ["quark-core", "quark-workbench"]
    assert own["devkit"] == ["quark-core", "quark-tiny-model", "quark-workbench"]
    plugins = [folder for folder in wheels if folder.startswith("plugins/")]
    extra = {"plugins/quark_vq": ["quark-schemes"]}  # a scheme of quark-vq names an observer of quark-schemes
    assert {folder: own[folder] for folder in plugins} == {folder: ["quark-core", *extra.get(folder, [])] for folder in plugins}


def test_machinery_of_tests_is_in_the_wheel_of_the_devkit_alone(wheels: dict[str, Path]) -> None:
    for folder, wheel in wheels.items():
        with zipfile.ZipFile(wheel) as archive:
            modules = [n for n in archive.namelist() if n.endswith(".py")]
            imports = {n.name.partition(".")[0] for m in modules for n in imported(ast.parse(archive.read(m)))}
            entry_points = [archive.read(n).decode() for n in archive.namelist() if n.endswith("entry_points.txt")]
        assert (folder == "devkit") == bool(imports & {"pytest", "quark_devkit"}), folder
        assert (folder == "devkit") == any("[pytest11]" in text for text in entry_points), folder


def imported(tree: ast.AST) -> Iterator[ast.alias]:
    """The modules that code imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from node.names
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield ast.alias(node.module)


def test_the_core_wheel_is_code_alone(wheels: dict[str, Path]) -> None:
    assert wheels["core"].stat().st_size < 1_000_000


MAIN_JOB = """
import sys
import quark, quark_schemes
from quark_workbench.cli.main import main
from quark_tiny_model import tiny_model_dir

def program(*arguments):
    sys.argv = ["quark", *map(str, arguments)]
    try:
        main()
    except SystemExit as stop:
        if stop.code:
            raise

print(quark.__file__, quark_schemes.__file__)
program("plugins", "--json")
program("quantize", tiny_model_dir(), "out", "--scheme", "int4_wo_32")
program("evaluate", "out", "--reference", tiny_model_dir(), "--limit", "2", "--json")
"""


def test_wheels_alone_do_the_main_job(installed: Path, tmp_path: Path) -> None:
    where, _, rest = run(installed, "-c", MAIN_JOB, cwd=tmp_path).stdout.partition("\n")
    assert str(ROOT) not in where
    assert all(f'"{name}"' in rest for name in ("quark-schemes", "quark-algos", "quark-templates", "quark-exporters"))
    assert '"perplexity"' in rest


TYPED = """
from quark.torch import ModelQuantizer, nothing
from quark.torch.quantization.config.config import AWQConfig, QConfig

quantizer: int = ModelQuantizer
config: int = QConfig
algorithm: int = AWQConfig
"""


def test_type_checkers_see_the_import_paths_of_installed_wheels(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "typed.py").write_text(TYPED)
    (tmp_path / "mypy.ini").write_text("[mypy]\nfollow_imports = silent\n[mypy-torch.*,transformers.*]\nfollow_imports = skip\n")
    command = [sys.executable, "-m", "mypy", "--python-executable", str(installed), "--no-error-summary", "typed.py"]
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MYPYPATH")}
    done = subprocess.run(command, cwd=tmp_path, env=environment, check=False, capture_output=True, text=True)
    says = [
        'Module "quark.torch" has no attribute "nothing"',
        'expression has type "type[ModelQuantizer]", variable has type "int"',
        'expression has type "type[QConfig]", variable has type "int"',
        'expression has type "type[AWQConfig]", variable has type "int"',
    ]
    assert done.stdout.count("error:") == len(says), done.stdout + done.stderr
    assert [words for words in says if words not in done.stdout] == [], done.stdout


def commands(document: str) -> list[str]:
    """The arguments of pip, as the lines of a document's code give them."""
    code = re.findall(r"^```\w*\n(.*?)^```", (ROOT / document).read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return [line for block in code for line in PIP.findall(block)]


INSTALLS = sorted({line for document in DOCUMENTS for line in commands(document)})
OFFLINE = [line for line in INSTALLS if "pytorch.org" not in line]


@pytest.fixture
def fresh(tmp_path: Path) -> Path:
    """The interpreter of an environment that has the third-party packages of this one, and nothing of quark."""
    third_party = tmp_path / "third_party"
    third_party.mkdir()
    for place in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        for entry in (e for e in Path(place).iterdir() if not OURS.match(e.name) and e.suffix != ".pth"):
            (third_party / entry.name).symlink_to(entry)
    environment = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    own = Path(sysconfig.get_path("purelib", vars={"base": str(environment), "platbase": str(environment)}))
    (own / "third_party.pth").write_text(str(third_party), encoding="utf-8")
    return environment / "bin/python"


GRAPH_MODE = """
from torch import nn
from quark.config.layer import QLayerConfig
from quark.config.model import QConfig
from quark.runs import ModelQuantizer
ModelQuantizer(QConfig(QLayerConfig(), quant_mode="fx_graph_mode")).quantize_model(nn.Linear(2, 2))
"""


@pytest.mark.posix("an environment of links")
@pytest.mark.parametrize(
    ("arguments", "lacks"),
    [
        (["-m", "quark", "schemes"], "quark-workbench"),
        (["-c", GRAPH_MODE], "quark-graph"),
        (["-c", "from quark.torch import ModelQuantizer"], "quark-amd"),
        (["-c", "import quark; quark.schemes().get('fp8')"], "quark-schemes"),
        (["-c", "import quark; quark.algorithms().get('gptq')"], "quark-algos"),
        (["-c", "import quark; quark.exporters().get('safetensors')"], "quark-exporters"),
        (["-c", "import quark; quark.datasets().get('text')"], "quark-workbench"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_core_alone_says_what_it_lacks(wheels: dict[str, Path], fresh: Path, tmp_path: Path, arguments: list[str], lacks: str) -> None:
    own = sysconfig.get_path("purelib", vars={"base": str(fresh.parents[1]), "platbase": str(fresh.parents[1])})
    with zipfile.ZipFile(wheels["core"]) as archive:
        archive.extractall(own)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([str(fresh), *arguments], cwd=tmp_path, env=environment, check=False, capture_output=True, text=True)
    assert done.returncode != 0
    assert f"pip install {lacks}" in done.stderr, done.stderr


@pytest.fixture(scope="module")
def clone(wheels: dict[str, Path]) -> Path:
    """A folder with the sources of all distributions and the wheels in ``dist``, as a clone has them after ``make wheels``."""
    place = wheels["core"].parent
    (place / "sources/dist").mkdir()
    for wheel in wheels.values():
        shutil.copy(wheel, place / "sources/dist")
    return place / "sources"


def pip(python: Path, arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run pip for an environment, without any index; words with wildcards are expanded as a shell does."""
    words = [name for word in shlex.split(arguments) for name in (sorted(glob(word, root_dir=cwd)) if "*" in word else [word])]
    command = [sys.executable, "-m", "pip", "--python", str(python), *words, "--no-index", "--no-build-isolation"]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHONPATH"))}
    return subprocess.run(command, cwd=cwd, env=inherited | {"PIP_CONFIG_FILE": os.devnull}, capture_output=True, text=True, check=False)


@pytest.mark.posix("an environment of links, whose programs are in bin")
@pytest.mark.parametrize("arguments", [pytest.param(line, marks=pytest.mark.slow if "./" in line else ()) for line in OFFLINE])
def test_a_documented_command_installs_quark_and_what_it_asks_for(arguments: str, clone: Path, fresh: Path, tmp_path: Path) -> None:
    installed = pip(fresh, arguments, clone)
    assert installed.returncode == 0, installed.stdout + installed.stderr
    assert "Successfully installed" in installed.stdout
    listed = subprocess.run([str(fresh.parent / "quark"), "schemes"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert listed.returncode == 0, listed.stderr
    assert "int4_wo_64" in listed.stdout


def test_each_document_has_a_command_that_runs_here() -> None:
    assert all({*commands(document)} & {*OFFLINE} for document in DOCUMENTS)
    assert any("./" in line for line in OFFLINE)


@pytest.mark.posix("an environment of links")
def test_without_the_folder_of_wheels_pip_says_what_the_page_says(clone: Path, fresh: Path) -> None:
    (core,) = (clone / "dist").glob("quark_core-*.whl")
    failed = pip(fresh, f"install 'dist/{core.name}[all]'", clone)
    (message,) = re.findall(r"`(No matching distribution [^`]*)`", (ROOT / "docs/how-to/install.md").read_text(encoding="utf-8"))
    assert failed.returncode != 0
    assert message in failed.stderr


def test_torch_for_cpus_comes_from_one_index() -> None:
    named = {*INSTALLS} - {*OFFLINE}
    assert len(named) >= 2
    assert all(f"index-url {CPU_TORCH} " in f"{line} " for line in named)
    assert f"\nTORCH_INDEX ?= {CPU_TORCH}\n" in (ROOT / "Makefile").read_text(encoding="utf-8")


def from_pypi(text: str) -> list[str]:
    """What commands in a text would have pip look for on PyPI: distributions of ours, and extras that are such distributions.

    What other extras need is there: beside an installed distribution such a command works.
    """
    commands = [m[0] for m in re.finditer(r"pip install (?!-e )[^`\n#]*", text) if "--find-links" not in m[0]]
    words = [word.strip("'\"") for command in commands for word in command.split()]
    return [word for word in words if re.fullmatch(r"(quark|acme)-[\w-]+(\[(all|demo|cpu|cuda)\])?", word)]


def test_no_document_installs_a_distribution_of_ours_from_pypi() -> None:
    own = (ROOT / folder / "README.md" for folder in (*DISTRIBUTIONS, ".", "examples/acme_quant", "examples/from_amd_quark"))
    pages = {str(page): from_pypi(page.read_text(encoding="utf-8")) for page in [*(ROOT / "docs").rglob("*.md"), *own]}
    assert {page: words for page, words in pages.items() if words} == {}
    assert from_pypi("$ pip install quark-vllm   # beside vLLM\n`pip install 'quark-core[all]'`") == ["quark-vllm", "quark-core[all]"]
    assert from_pypi("`pip install 'quark-core[data]'`; pip install --find-links dist quark-vllm; pip install ./core") == []
