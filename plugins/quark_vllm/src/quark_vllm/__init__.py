"""A plugin of vLLM that serves checkpoints of every scheme, even if vLLM itself cannot load them."""

from __future__ import annotations

__all__ = ["register"]


def register() -> None:
    """Register the quantization methods with vLLM. vLLM calls this function in each of its processes."""
    import quark_vllm.quantization  # noqa: F401 - the import registers the methods
