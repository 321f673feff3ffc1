"""`tracing`: what torch changes while it traces a model, and what it keeps."""

import gc
import logging
import os
import threading
import weakref
from contextlib import suppress

import pytest
import torch
from torch import nn
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from quark.base.tracing import tracing

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # of torch's own code

_INPUT = torch.zeros(2, 4)
_SHAPES = ({0: torch.export.Dim("batch")},)


def _traced() -> weakref.ref[nn.Parameter]:
    """Trace a layer, and return a weak reference to its weight."""
    layer = nn.Linear(4, 4)
    with tracing() as programs, torch.no_grad():
        programs.append(torch.export.export(layer, (_INPUT,), dynamic_shapes=_SHAPES).run_decompositions())
    return weakref.ref(layer.weight)


def _environments() -> int:
    gc.collect()
    gc.collect()  # objects with finalizers go the second time
    return sum(type(one) is ShapeEnv for one in gc.get_objects())


def test_a_traced_model_is_released() -> None:
    before = _environments()
    weight = _traced()
    assert _environments() == before
    assert weight() is None


def test_a_program_computes_after_the_context_too() -> None:
    layer = nn.Linear(4, 4)
    with tracing() as programs, torch.no_grad():
        programs.append(torch.export.export(layer, (_INPUT,), dynamic_shapes=_SHAPES))
    x = torch.randn(3, 4)
    assert torch.equal(programs[0].module()(x), layer(x))


def test_the_state_of_the_process_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_COMPILE_DEBUG", "0")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    logger, handler = logging.getLogger("torch.__trace"), logging.NullHandler()
    logger.addHandler(handler)
    try:
        with suppress(KeyError), tracing():
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = "elsewhere"
            del os.environ["TORCH_COMPILE_DEBUG"]
            logger.removeHandler(handler)
            raise KeyError
        assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ
        assert os.environ["TORCH_COMPILE_DEBUG"] == "0"
        assert handler in logger.handlers
    finally:
        logger.removeHandler(handler)


def test_no_thread_is_left() -> None:
    tqdm = pytest.importorskip("tqdm").tqdm
    if tqdm.monitor is not None:
        tqdm.monitor.exit()
        tqdm.monitor = None
    before, interval = threading.active_count(), tqdm.monitor_interval
    _traced()
    assert (threading.active_count(), tqdm.monitor_interval) == (before, interval)
