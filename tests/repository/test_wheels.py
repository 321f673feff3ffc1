"""The wheels: what they hold, what they say of themselves, and that they work where nothing of this checkout can be seen."""

import ast
import os
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from collections.abc import Iterator
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
DISTRIBUTIONS = [
    "core",
    *sorted(f"plugins/{p.parent.name}" for p in ROOT.glob("plugins/*/pyproject.toml")),
    "workbench",
    "tiny_model",
    "devkit",
]


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
    assert all(own[folder] == ["quark-core"] for folder in plugins)


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
from quark.cli.main import main
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
