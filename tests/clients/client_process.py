"""ClientProcess: a program in its own interpreter, which loads one checkpoint after the other.

Loading torch and a runtime takes longer than loading a tiny model. So one process serves all tests of a
client.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs

__all__ = ["ClientError", "ClientProcess", "client_process"]

_ANSWER = "ANSWER "
_SERVE = """
if __name__ == "__main__":
    import importlib.metadata, json, sys
    for line in sys.stdin:
        try:
            answer = {"result": serve(**json.loads(line))}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print("ANSWER " + json.dumps(answer), flush=True)
"""


class ClientError(Exception):
    """The client failed; the message is the client's message."""


@attrs.define
class ClientProcess:
    """A running client.

    Attributes:
        command: Command that starts the client.
        environment: Environment variables of the client.
        log: File for the client's standard error.
    """

    command: list[str]
    environment: Mapping[str, str]
    log: Path
    _process: subprocess.Popen[str] | None = None

    def ask(self, **arguments: Any) -> Any:
        """Call the script's function ``serve`` with JSON values, and return its result.

        Raises:
            ClientError: ``serve`` raised an exception, or the process ended. The next call starts another
                process.
        """
        if self._process is None or self._process.poll() is not None:
            with self.log.open("w") as log:
                self._process = subprocess.Popen(
                    self.command, env=dict(self.environment), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
                )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(arguments) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith(_ANSWER):
                answer = json.loads(line.removeprefix(_ANSWER))
                if "error" in answer:
                    raise ClientError(answer["error"])
                return answer["result"]
        raise ClientError(f"the process ended: {self.log.read_text(encoding='utf-8', errors='replace')[-3000:]}")

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.terminate()
            self._process.communicate(timeout=60)


@contextmanager
def client_process(python: str, script: str, folder: Path, **environment: str) -> Iterator[ClientProcess]:
    """Yield a client, whose process starts with the first call and ends with the context.

    Args:
        python: Interpreter of the client. It finds this project's packages only if ``environment`` sets
            ``PYTHONPATH``.
        script: Python source that defines ``serve``.
        folder: Folder for the script and the log.
        **environment: Environment variables to add.
    """
    path = folder / "client.py"
    path.write_text(script + _SERVE, encoding="utf-8")
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    process = ClientProcess([python, str(path)], inherited | environment, folder / "client.log")
    try:
        yield process
    finally:
        process.close()
