"""The environment of a neighbour. pip makes this environment, and lists the packages in it and complaints
about them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import attrs

from tools.neighbours import Neighbour

__all__ = ["Changes", "Environment", "FailedCommandError", "changes", "difference"]


class FailedCommandError(Exception):
    """A command in an environment failed; the message has the command and the end of its output."""


@attrs.frozen
class Environment:
    """A virtual environment.

    Attributes:
        python: The interpreter of the environment.
    """

    python: Path

    @classmethod
    def made(cls, folder: Path, neighbour: Neighbour, torch_index: str) -> Environment:
        """Make a fresh environment, and install a neighbour in the way in which users install it."""
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        environment = cls(folder / "bin/python")
        environment.pip(*neighbour.install(torch_index))
        return environment

    def pip(self, *arguments: str, may_fail: bool = False) -> str:
        """Run pip, and return its output."""
        return self.run("-m", "pip", *arguments, may_fail=may_fail)

    def quark(self, *arguments: object, cwd: Path) -> str:
        """Run the program of quark, and return its output."""
        return self.run("-c", "from quark_workbench.cli.main import main; main()", *map(str, arguments), cwd=cwd)

    def run(self, *arguments: str, cwd: Path | None = None, may_fail: bool = False) -> str:
        """Run the interpreter, and return its output.

        Raises:
            FailedCommandError: The exit status is not zero, and ``may_fail`` is False.
        """
        command = [str(self.python), *arguments]
        done = subprocess.run(command, cwd=cwd, env=self.variables(), capture_output=True, text=True, check=False)
        if done.returncode and not may_fail:
            raise FailedCommandError(f"{' '.join(command)[:300]} failed:\n{(done.stdout + done.stderr)[-3000:]}")
        return done.stdout

    def variables(self) -> dict[str, str]:
        """Return environment variables for commands. They do not refer to this checkout, and they turn off
        access to the Hub."""
        inherited = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
        return inherited | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "2", "VLLM_CPU_KVCACHE_SPACE": "1"}

    def packages(self) -> dict[str, str]:
        """Return the version of each installed distribution, or the address from which it was installed, by
        name."""
        lines = self.pip("freeze").splitlines()
        return {name: rest for name, _, rest in (line.replace(" @ ", "==").partition("==") for line in lines) if name}

    def complaints(self) -> list[str]:
        """Return the complaints of ``pip check``."""
        return [line for line in self.pip("check", may_fail=True).splitlines() if line != "No broken requirements found."]


@attrs.frozen
class Changes:
    """The changes of an installation.

    Attributes:
        added: New distributions.
        changed: ``NAME OLD → NEW`` for each existing distribution that changed; NEW is ``none`` if the
            distribution is gone.
        complaints: New complaints of ``pip check``.
    """

    added: Sequence[str]
    changed: Sequence[str]
    complaints: Sequence[str]


def changes(environment: Environment, neighbour: Neighbour, wheels: Path) -> Changes:
    """Install our wheels beside a neighbour, and return the changes."""
    before, complaints = environment.packages(), environment.complaints()
    environment.pip("install", "--find-links", str(wheels), *neighbour.ours)
    after = environment.packages()
    return Changes(*difference(before, after), [line for line in environment.complaints() if line not in complaints])


def difference(before: dict[str, str], after: dict[str, str]) -> tuple[list[str], list[str]]:
    """Return the added packages and the changed packages. ``before`` and ``after`` map names to versions."""
    added = [name for name in after if name not in before]
    return added, [f"{name} {old} → {after.get(name, 'none')}" for name, old in before.items() if after.get(name) != old]
