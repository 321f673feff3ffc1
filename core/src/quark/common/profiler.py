"""``quark.common.profiler``: AMD Quark's clock of the steps of a script. With ``QUARK_PROFILING=1`` it writes their times to a file."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["GlobalProfiler", "ProfileStep"]


class ProfileStep:
    """Names of steps, as AMD Quark's scripts use them."""

    DATASET_LOADING = "Dataset Loading"
    EXPORT_GGUF = "Export GGUF"
    EXPORT_HF_SAFETENSORS = "Export HF Safetensors"
    EXPORT_ONNX = "Export ONNX"
    FILE_TO_FILE_QUANTIZATION = "File-to-File Quantization"
    MODEL_EVALUATION = "Model Evaluation"
    MODEL_LOADING = "Model Loading"
    MODEL_QUANTIZATION = "Model Quantization"
    USER_DEFINED = "User-Defined"


class GlobalProfiler:
    """Measures steps; without the environment variable ``QUARK_PROFILING=1`` it does nothing.

    Args:
        output_path: File that gets a line of YAML for each step, when the step ends.
    """

    def __init__(self, output_path: str | Path = "quark_profile.yaml") -> None:
        self.enabled = os.environ.get("QUARK_PROFILING") == "1"
        self.output_path = Path(output_path)

    @contextmanager
    def scope(self, step: str, user_msg: str | None = None) -> Iterator[None]:
        """Measure the body as one step.

        Args:
            step: Its name.
            user_msg: A name of one's own, in place of it.
        """
        started = time.perf_counter()
        yield
        if self.enabled:
            self.output_path.parent.mkdir(parents=True, exist_ok=True)
            with self.output_path.open("a", encoding="utf-8") as file:
                file.write(f"- {json.dumps({'step': user_msg or step, 'seconds': round(time.perf_counter() - started, 3)})}\n")
