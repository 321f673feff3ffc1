"""``quark.torch.utils.device``: what AMD Quark's scripts ask of devices."""

from __future__ import annotations

from quark.compat.not_offered import not_offered

__all__ = ["TPDeviceManager"]


class TPDeviceManager:
    """AMD Quark's tensor parallelism for evaluation, which is not offered: vLLM has it."""

    tp_mesh_init = staticmethod(not_offered("tensor-parallel evaluation", "evaluate the export with quark evaluate --backend vllm"))

    @staticmethod
    def tp_cleanup() -> None:
        """Do nothing: nothing was set up."""
