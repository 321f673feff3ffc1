"""The counted runs: each algorithm on each route quantizes a small model."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

from quark.config.model import QConfig
from quark.plugins import Event, PhaseStarted, listening
from quark.runs import ModelQuantizer, quantize_checkpoint
from quark.torch import LLMTemplate
from quark_devkit.simulated_device import NAME, simulated_device
from tools.costs.counter import Counts, OperationCounter
from tools.costs.kernel_counter import IS_INTERPRETED, counted_kernels

__all__ = ["RUNS", "Cost", "Part", "cost_of", "parts_of"]

BLOCKS, HIDDEN, VOCABULARY, SAMPLES, TOKENS = 2, 128, 768, 8, 128
"""Sizes that match SmolLM2-135M with 8 sequences of 512 tokens: tokens ÷ channels, and the head's FLOPs.

So a run's FLOPs ÷ a forward's FLOPs are close to the ratio for that model.
"""


@attrs.frozen(eq=False)
class RunCase:
    """A run to count.

    Attributes:
        scheme: Name of the scheme.
        algorithms: Names of the algorithms, in order.
        settings: Settings that differ from the defaults, by the name of the algorithm.
        is_from_disk: Whether the model goes from a checkpoint to a checkpoint.
        uses_kernels: Whether Triton kernels, in Triton's interpreter, do the rounding. A launch counts as one
            operation.
    """

    scheme: str
    algorithms: tuple[str, ...] = ()
    settings: Mapping[str, Mapping[str, Any]] = attrs.field(factory=dict)
    is_from_disk: bool = False
    uses_kernels: bool = False

    @property
    def can_be_counted(self) -> bool:
        """Whether this process can count the run: kernels need Triton and ``TRITON_INTERPRET=1``."""
        return IS_INTERPRETED or not self.uses_kernels


RUNS: Mapping[str, RunCase] = {
    "rtn": RunCase("int4_wo_64"),
    "rtn, from disk": RunCase("int4_wo_64", is_from_disk=True),
    "mxfp4": RunCase("mxfp4"),
    "static int8": RunCase("int8"),
    "gptq": RunCase("int4_wo_64", ("gptq",)),
    "gptq, from disk": RunCase("int4_wo_64", ("gptq",), is_from_disk=True),
    "gptaq": RunCase("int4_wo_64", ("gptaq",)),
    "qronos": RunCase("int4_wo_64", ("qronos",)),
    "smoothquant, int8": RunCase("int8", ("smoothquant",)),
    "autosmoothquant": RunCase("int4_wo_64", ("autosmoothquant",)),
    "awq": RunCase("int4_wo_64", ("awq",)),
    "awq+gptq": RunCase("int4_wo_64", ("awq", "gptq")),
    "lqer": RunCase("int4_wo_64", ("lqer",)),
    "rotation+gptq, mxfp4": RunCase("mxfp4", ("rotation", "gptq")),
    "rotation+smoothquant, int8": RunCase("int8", ("rotation", "smoothquant")),
    "awq+gptq+tuning, one epoch": RunCase("int4_wo_64", ("awq", "gptq", "tuning"), {"tuning": {"epochs": 1, "compute_dtype": "bfloat16"}}),
    "rtn, kernels": RunCase("int4_wo_64", uses_kernels=True),
    "mxfp4, kernels": RunCase("mxfp4", uses_kernels=True),
}


@attrs.frozen
class Cost:
    """The cost of a run, in units that do not depend on the machine.

    Attributes:
        flops: FLOPs ÷ FLOPs of a forward pass of the float model over the calibration tokens.
        bytes: Bytes read and written ÷ bytes of the float weights of the decoder blocks.
        operations: Operations for each block.
        waits: Number of times that the host waits for a device; None for runs from disk and for runs with
            kernels.
    """

    flops: float
    bytes: float
    operations: int
    waits: int | None


@attrs.frozen
class Part:
    """A part of the cost of a run.

    Attributes:
        phase: Phase of the run.
        module: Module that does the work.
        flops: As in `Cost`.
        bytes: As in `Cost`.
        operations: As in `Cost`.
    """

    phase: str
    module: str
    flops: float
    bytes: float
    operations: int


def cost_of(case: RunCase) -> Cost:
    """Count a run."""
    forward, weights = _forward_and_weights()
    total = sum(_counted(case).values(), Counts())
    waits = None if case.is_from_disk or case.uses_kernels else _waits(case)
    return Cost(round(total.flops / forward, 3), round(total.bytes / weights, 1), total.operations // BLOCKS, waits)


def parts_of(case: RunCase) -> list[Part]:
    """Return the parts of the cost of a run, in descending order of bytes."""
    forward, weights = _forward_and_weights()
    ordered = sorted(_counted(case).items(), key=lambda item: -item[1].bytes)
    return [Part(*part, round(c.flops / forward, 3), round(c.bytes / weights, 1), c.operations // BLOCKS) for part, c in ordered]


def _counted(case: RunCase) -> dict[tuple[str, str], Counts]:
    """Return the `Counts` of a run by phase and module.

    The plan is not counted, since the cost of a plan depends on earlier plans in the process.
    """
    config = _config(case)
    _warm_up(RUNS["rtn, from disk"])
    _warm_up(attrs.evolve(case, uses_kernels=False))
    with _one_thread(), _prepared(case, config) as run:
        counter = OperationCounter()

        def hear(event: Event) -> None:
            if isinstance(event, PhaseStarted):
                counter.phase = event.phase

        with listening(hear), counted_kernels(counter) if case.uses_kernels else nullcontext(), counter:
            run()
    return {part: counts for part, counts in counter.parts.items() if part[0] != "plan"}


@cache
def _warm_up(case: RunCase) -> None:
    """Do a run of one sample to fill the caches of the process."""
    with _prepared(case, _config(case), samples=1) as run:
        run()


@cache
def _forward_and_weights() -> tuple[float, int]:
    """Return the FLOPs of a forward pass of the float model over all tokens, and the bytes of the weights in
    the blocks."""
    model = _model()
    with torch.no_grad(), OperationCounter() as counter:
        for sequence in _tokens():
            model(sequence)
    return counter.total.flops, sum(p.nbytes for p in model.model.layers.parameters() if p.ndim == 2)


@contextmanager
def _prepared(case: RunCase, config: QConfig, samples: int = SAMPLES) -> Iterator[Callable[[], object]]:
    """Prepare a run, and yield a function that does it."""
    data = _tokens()[:samples] if _needs_data(case) else None
    if not case.is_from_disk:
        model = _model()
        yield lambda: ModelQuantizer(config).quantize_model(model, data)
        return
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        _model().save_pretrained(Path(folder) / "float")
        yield lambda: quantize_checkpoint(Path(folder) / "float", Path(folder) / "quantized", config, data)


def _waits(case: RunCase) -> int:
    """Return how often the host waits for the simulated accelerator."""
    config = _config(case)
    with _one_thread(), simulated_device() as device:
        model = _model().to(NAME)
        device.waits.clear()
        ModelQuantizer(config).quantize_model(model, _tokens() if _needs_data(case) else None)
        return len(device.waits)


def _needs_data(case: RunCase) -> bool:
    return bool(case.algorithms) or case.scheme == "int8"


def _config(case: RunCase) -> QConfig:
    config: QConfig = LLMTemplate.get("llama").get_config(scheme=case.scheme, algorithm=list(case.algorithms) or None)
    for settings in config.algo_config or []:
        for name, value in case.settings.get(settings.name, {}).items():
            setattr(settings, name, value)
    return config


def _model() -> Any:
    """Return a Llama with random weights. The attention of this model uses operations that have FLOP
    formulas.

    The norms' channels have very different scales. So equalization has a clear gain, and a run makes the same
    choices on every CPU.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": HIDDEN, "intermediate_size": 3 * HIDDEN, "num_hidden_layers": BLOCKS, "vocab_size": VOCABULARY}
    config = LlamaConfig(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=TOKENS, **sizes)
    config._attn_implementation = "eager"
    model: Any = LlamaForCausalLM(config).eval().requires_grad_(False)
    for block in model.model.layers:
        for norm, readers in (("input_layernorm", ("q", "k", "v")), ("post_attention_layernorm", ("gate", "up"))):
            factors = torch.randn(HIDDEN).exp()
            block.get_parameter(f"{norm}.weight").mul_(factors)
            for name in readers:
                block.get_parameter(f"{'self_attn' if len(readers) == 3 else 'mlp'}.{name}_proj.weight").div_(factors)
    return model


def _tokens() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, VOCABULARY, (1, TOKENS), generator=generator) for _ in range(SAMPLES)]


@contextmanager
def _one_thread() -> Iterator[None]:
    """Make torch compute in this thread alone, since the counter does not count the operations of other
    threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
