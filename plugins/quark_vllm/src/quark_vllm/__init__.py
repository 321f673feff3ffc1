"""Checkpoints of every scheme in vLLM: a plugin of vLLM, which serves what vLLM itself does not load."""

from __future__ import annotations

__all__ = ["register"]


def register() -> None:
    """Register the quantization methods with vLLM, which calls this in each of its processes."""
    import quark_vllm.quantization  # noqa: F401 - registers them
