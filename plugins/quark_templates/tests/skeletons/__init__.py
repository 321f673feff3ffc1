"""Module skeletons of families whose code comes with their checkpoints, by model type."""

from __future__ import annotations

from collections.abc import Callable

from .chatglm import chatglm
from .deepseek import deepseek
from .deepseek_vl_v2 import deepseek_vl_v2
from .grok_1 import grok_1
from .instella import instella
from .kimi_k2 import kimi_k2
from .kimi_k3 import kimi_k3
from .parts import Skeleton
from .qwen import qwen

SKELETONS: dict[str, Callable[[], Skeleton]] = {
    "chatglm": chatglm,
    "deepseek": deepseek,
    "deepseek_vl_v2": deepseek_vl_v2,
    "grok-1": grok_1,
    "instella": instella,
    "kimi_k2": kimi_k2,
    "kimi_k3": kimi_k3,
    "qwen": qwen,
}
