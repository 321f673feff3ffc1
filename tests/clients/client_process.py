"""ClientProcess: a program in an interpreter of its own, which loads one checkpoint after the other.

Loading torch and a runtime takes longer than loading a tiny model, so that one process serves all tests of a
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
    """The client failed; the message is its own."""


@attrs.define
class ClientProcess:
    """A running client.

    Attributes:
        command: What starts it.
        environment: In which environment variables.
        log: File of what it writes to standard error.
    """

    command: list[str]
    environment: Mapping[str, str]
    log: Path
    _process: subprocess.Popen[str] | None = None

    def ask(self, **arguments: Any) -> Any:
        """Call the script's function ``serve`` with JSON values, and return its result.

        Raises:
            ClientError: It raised, or the process has ended; the next call starts another.
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
    """Yield a client that starts when it is first asked, and ends with the context.

    Args:
        python: Its interpreter; it sees nothing of this project but what ``PYTHONPATH`` of its environment
            names.
        script: Python source that defines ``serve``.
        folder: Where the script and the log go.
        **environment: Variables in addition to the present ones.
    """
    path = folder / "client.py"
    path.write_text(script + _SERVE, encoding="utf-8")
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    process = ClientProcess([python, str(path)], inherited | environment, folder / "client.log")
    try:
        yield process
    finally:
        process.close()
