"""Layouts with one thing wrong each."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import attrs
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from quark.base.lazy import ObjectRef
from quark.checkpoint import BlockStream, CheckpointContent, ExportOptions, FloatTensor, StoredConfig
from quark.checkpoint.inspection import RuntimeSupport
from quark.errors import UnsupportedError
from quark.models.layers import QuantizedLayer
from quark.models.layers.packed_layers import PackedLayer
from quark.models.plan.quant_plan import QuantPlan

from . import forgetful_layouts, unsafe_layouts
from .healthy_layouts import Announcing, Dequantizer, Plain, Reader, Resuming, Sharing, Streaming, changed_json, record_of
from .mutant import Mutant

__all__ = ["HEALTHY", "MUTANTS"]


class LosesBlocks(Sharing):
    """Leaves the blocks of a process that has joined out of the files, and reports them as written."""

    @contextmanager
    def stream(self, content: CheckpointContent, skeleton: nn.Module, out: Path, options: ExportOptions) -> Iterator[BlockStream]:
        has_joined = any(out.iterdir())
        with super().stream(content, skeleton, out, options) as stream:
            if has_joined:
                names = dict.fromkeys((name for part in self.announced(content, skeleton, options) for name in part), "")
                stream.write = lambda block: None  # type: ignore[method-assign]
                stream.written = lambda: names  # type: ignore[method-assign]
            yield stream


class ForgetsTheScales(Dequantizer):
    def float_tensors(self, block: Mapping[str, Any], stored: Mapping[str, Tensor]) -> Iterator[FloatTensor]:
        for one in super().float_tensors(block, stored):
            yield attrs.evolve(one, make=lambda _, dtype, shape=one.shape: torch.ones(shape, dtype=dtype))


class RenamesWhatItMakes(Dequantizer):
    def float_tensors(self, block: Mapping[str, Any], stored: Mapping[str, Tensor]) -> Iterator[FloatTensor]:
        for one in super().float_tensors(block, stored):
            yield attrs.evolve(one, name=one.name.removesuffix(".weight"))


class WithoutWords(Plain):
    def export(self, content: CheckpointContent, out: Path, options: ExportOptions) -> None:
        raise KeyError("fp4")


class RefusesLate(Plain):
    def export(self, content: CheckpointContent, out: Path, options: ExportOptions) -> None:
        super().export(content, out, options)
        if "fp4" in str(content.config):
            raise UnsupportedError("it has no place for fp4")


class LiesInTheIndex(Plain):
    def export(self, content: CheckpointContent, out: Path, options: ExportOptions) -> None:
        super().export(content, out, options)
        if (out / "model.safetensors.index.json").exists():
            changed_json(out / "model.safetensors.index.json", lambda data: data["weight_map"].pop("model.embed_tokens.weight"))


class WrongTotal(Plain):
    def export(self, content: CheckpointContent, out: Path, options: ExportOptions) -> None:
        super().export(content, out, options)
        if (out / "model.safetensors.index.json").exists():
            changed_json(out / "model.safetensors.index.json", lambda data: data["metadata"].update(total_size=1))


class TooShort(Plain):
    def export(self, content: CheckpointContent, out: Path, options: ExportOptions) -> None:
        super().export(content, out, options)
        for path in out.glob("*.safetensors"):
            path.write_bytes(path.read_bytes()[:-8])


class Dated(Plain):
    def named(self, out: Path) -> None:
        super().named(out)
        changed_json(out / "config.json", lambda data: data.update(written=time.perf_counter_ns()))


class SwallowsErrors(Plain):
    def export(self, content: CheckpointContent, out: Path, options: ExportOptions) -> None:
        (out / "begun.txt").write_text("begun", encoding="utf-8")
        with suppress(OSError):
            super().export(content, out, options)


class WritesBeside(Plain):
    def export(self, content: CheckpointContent, out: Path, options: ExportOptions) -> None:
        (out.parent / "log.txt").write_text("begun", encoding="utf-8")
        super().export(content, out, options)


class LogsBeforeFailing(Plain):
    """Writes to the place where the output is going to be, which a failure leaves there."""

    def export(self, content: CheckpointContent, out: Path, options: ExportOptions) -> None:
        (out.parent.parent / "begun.txt").write_text("begun", encoding="utf-8")
        super().export(content, out, options)


class ChangesTheModel(Plain):
    def export(self, content: CheckpointContent, out: Path, options: ExportOptions) -> None:
        super().export(content, out, options)
        next(content.model.parameters()).data.mul_(2)


class ChangesTheConfiguration(Plain):
    def export(self, content: CheckpointContent, out: Path, options: ExportOptions) -> None:
        super().export(content, out, options)
        content.model.config.use_cache = False  # type: ignore[union-attr]


class WritesNotes(Plain):
    def named(self, out: Path) -> None:
        super().named(out)
        (out / "notes.txt").write_text("made", encoding="utf-8")


class StreamsOtherwise(Streaming):
    @contextmanager
    def stream(self, content: CheckpointContent, skeleton: nn.Module, out: Path, options: ExportOptions) -> Iterator[BlockStream]:
        with super().stream(content, skeleton, out, attrs.evolve(options, pack_method="order")) as stream:
            yield stream


class ForgetsToAnnounce(Announcing):
    def announced(self, content: CheckpointContent, skeleton: nn.Module, options: ExportOptions) -> list[Mapping[str, Tensor]]:
        return super().announced(content, skeleton, options)[1:]


class AnnouncesFloats(Announcing):
    """Announces scales in another dtype than it writes them in."""

    def announced(self, content: CheckpointContent, skeleton: nn.Module, options: ExportOptions) -> list[Mapping[str, Tensor]]:
        parts = super().announced(content, skeleton, options)
        return [{name: t.double() if name.endswith("_scale") else t for name, t in part.items()} for part in parts]


class AnnouncesAnotherOrder(Announcing):
    """Writes first the tensor that it announces last, so that shards are of other sizes."""

    def announced(self, content: CheckpointContent, skeleton: nn.Module, options: ExportOptions) -> list[Mapping[str, Tensor]]:
        return super().announced(content, skeleton, options)[::-1]


class ReadsNothing(Resuming):
    def opened_again(self, stream: Any) -> Any:
        stream.read = lambda block: None
        return stream


class ReadsAnotherDtype(Resuming):
    """Its weights are those that were written, rounded once more."""

    def opened_again(self, stream: Any) -> Any:
        read = stream.read

        def read_and_round(block: Any) -> None:
            read(block)
            for parameter in block.module.parameters():
                parameter.data = parameter.data.to(torch.float8_e4m3fn).to(parameter.dtype)

        stream.read = read_and_round
        return stream


class TrustsItsFiles(Resuming):
    def opened_again(self, stream: Any) -> Any:
        adopt = stream.adopt
        stream.adopt = lambda block, checksums: adopt(block, {name: text.removeprefix("not ") for name, text in checksums.items()})
        return stream


class StartsAgain(Resuming):
    def opened_again(self, stream: Any) -> Any:
        stream.adopt = lambda block, checksums: list(checksums)
        return stream


class NeverStores(Resuming):
    @contextmanager
    def stream(self, content: CheckpointContent, skeleton: nn.Module, out: Path, options: ExportOptions) -> Iterator[BlockStream]:
        with super().stream(content, skeleton, out, options) as stream:
            stream.when_stored = lambda then: None  # type: ignore[method-assign]
            yield stream


class TakesEveryOption(Plain):
    def __init__(self, **options: Any) -> None:
        self.options = options


class WrongDefault(Plain):
    def __init__(self, level: int = "high") -> None: ...  # type: ignore[assignment]


class OtherMethod(Plain):
    method = "another-method"


class ForgetsTheOrder(Plain):
    def export(self, content: CheckpointContent, out: Path, options: ExportOptions) -> None:
        super().export(content, out, attrs.evolve(options, pack_method="order"))
        changed_json(out / "config.json", lambda data: data["quantization_config"]["export"].update(pack_method=options.pack_method))


class IgnoresTheFormat(Plain):
    """Says that rounded values were stored, and stores codes."""

    def export(self, content: CheckpointContent, out: Path, options: ExportOptions) -> None:
        super().export(content, out, attrs.evolve(options, weight_format="real_quantized"))
        block = {"weight_format": options.weight_format}
        changed_json(out / "config.json", lambda data: data["quantization_config"]["export"].update(block))


class Rewrites(Plain):
    def export(self, content: CheckpointContent, out: Path, options: ExportOptions) -> None:
        super().export(content, out, options)
        for path in out.glob("*.safetensors"):
            save_file(self.changed(load_file(path)), path, metadata={"format": "pt"})

    changed: Any = None


class HalvesTheEmbedding(Rewrites):
    changed = staticmethod(lambda tensors: {n: t / 2 if "embed" in n else t for n, t in tensors.items()})


class DropsBiases(Rewrites):
    changed = staticmethod(lambda tensors: {n: t for n, t in tensors.items() if not n.endswith(".bias")})


class TakesTheHeadForTied(Rewrites):
    changed = staticmethod(lambda tensors: {n: t for n, t in tensors.items() if n != "lm_head.weight"})


class SilencesBranches(Rewrites):
    holds_branches = True
    changed = staticmethod(lambda tensors: {n: t * 0 if ".branch." in n else t for n, t in tensors.items()})


def _callers() -> str:
    import traceback

    return " ".join(frame.filename for frame in traceback.extract_stack())


class FailsInTransformers(Reader):
    """Reads for quark, and not when transformers asks."""

    def configuration(self, block: Mapping[str, Any], directory: Path) -> StoredConfig:
        if "transformers_loading" in _callers():
            raise RuntimeError("it is not read by transformers")
        return super().configuration(block, directory)


class DropsItsBias(PackedLayer):
    def from_codes(self) -> QuantizedLayer:
        layer = super().from_codes()
        layer.bias = None
        return layer


class DropsBiasesOfWhatStaysPacked(Reader):
    def prepare(self, model: nn.Module, stored: StoredConfig) -> QuantPlan:
        plan = super().prepare(model, stored)
        for layer in model.modules():
            if isinstance(layer, PackedLayer):
                layer.__class__ = DropsItsBias
        return plan


class ForgetsSizes(Plain):
    def named(self, out: Path) -> None:
        super().named(out)
        changed_json(out / "config.json", lambda data: data.update(max_position_embeddings=1))


class ChecksNothing(Plain):
    def check(self, content: CheckpointContent, skeleton: nn.Module, options: ExportOptions) -> None:
        pass

    def export(self, content: CheckpointContent, out: Path, options: ExportOptions) -> None:
        if "fp4" in str(content.config):
            raise UnsupportedError("it has no place for fp4")
        super().export(content, out, options)


class WithoutTokenizer(Plain):
    def export(self, content: CheckpointContent, out: Path, options: ExportOptions) -> None:
        super().export(content, out, options)
        (out / "tokenizer.json").unlink(missing_ok=True)


class SaysNothing:
    def support(self, facts: Any) -> Iterator[RuntimeSupport]:
        yield RuntimeSupport("acme", "a runtime", {})


class SaysYes:
    def support(self, facts: Any) -> Iterator[RuntimeSupport]:
        yield RuntimeSupport("acme", "a runtime", {"a kernel": "all layers"})


HEALTHY = (record_of(Sharing, inspector=ObjectRef(SaysYes)),)


def _mutant(check: str, about: str, exporter: Any = Streaming, **fields: Any) -> Mutant:
    return Mutant(f"layout:{check}", about, (record_of(exporter, **fields),))


MUTANTS = (
    _mutant("names_no_place_of_this_machine", "writes the path of its source", unsafe_layouts.NamesItsSource),
    _mutant("names_no_place_of_this_machine", "writes the name of the machine", unsafe_layouts.NamesTheMachine),
    _mutant("names_no_place_of_this_machine", "writes the time of the export", unsafe_layouts.NamesTheDay),
    _mutant("writes_no_pickle", "writes a pickle", unsafe_layouts.Pickles),
    _mutant("reads_without_side_effects", "writes a file beside those that it reads", reader=ObjectRef(unsafe_layouts.TakesNotes)),
    _mutant("reads_without_side_effects", "unpickles", reader=ObjectRef(unsafe_layouts.Unpickles)),
    _mutant("heeds_its_options", "does nothing with its option", unsafe_layouts.WithAnIdleOption),
    _mutant("stores_or_refuses_every_scheme", "raises KeyError", WithoutWords),
    _mutant("stores_or_refuses_every_scheme", "refuses after it has written", RefusesLate),
    _mutant("stores_or_refuses_every_scheme", "says nothing when it is asked, and refuses when it writes", ChecksNothing),
    _mutant("writes_sound_files", "leaves a tensor out of the index", LiesInTheIndex),
    _mutant("writes_sound_files", "writes a wrong total size", WrongTotal),
    _mutant("writes_sound_files", "writes files that are too short", TooShort),
    _mutant("writes_the_same_twice", "writes the time", Dated),
    _mutant("leaves_nothing_after_a_failure", "takes no notice of a full disk", SwallowsErrors),
    _mutant("leaves_nothing_after_a_failure", "writes beside the output", LogsBeforeFailing),
    _mutant("writes_in_its_directory_alone", "writes beside its directory", WritesBeside),
    _mutant("leaves_the_model_as_it_is", "doubles a parameter", ChangesTheModel),
    _mutant("leaves_the_model_as_it_is", "turns training mode on", forgetful_layouts.Trains),
    _mutant("leaves_the_model_as_it_is", "changes the configuration", ChangesTheConfiguration),
    _mutant("declares_its_files", "writes a file that it does not declare", WritesNotes),
    _mutant("declares_streaming", "says that it streams", Plain, capabilities={"streaming"}),
    _mutant("declares_streaming", "does not say that it streams", Streaming, capabilities=()),
    _mutant("declares_streaming", "says that it resumes", Streaming, capabilities={"streaming", "resumable"}),
    _mutant("declares_streaming", "does not say that it resumes", Resuming, capabilities={"streaming"}),
    _mutant("announces_what_it_writes", "leaves tensors out of what it announces", ForgetsToAnnounce),
    _mutant("announces_what_it_writes", "announces another dtype", AnnouncesFloats),
    _mutant("announces_what_it_writes", "announces tensors in another order", AnnouncesAnotherOrder),
    _mutant("is_written_by_two_processes", "loses the blocks of one", LosesBlocks),
    _mutant("resumes", "reads no finished block", ReadsNothing),
    _mutant("resumes", "reads weights with less precision", ReadsAnotherDtype),
    _mutant("resumes", "does not notice damage", TrustsItsFiles),
    _mutant("resumes", "forgets what is finished", StartsAgain),
    _mutant("resumes", "never says that a block is on the disk", NeverStores),
    _mutant("writes_the_same_from_disk", "streams in another order", StreamsOtherwise),
    _mutant("refuses_unknown_options", "takes every option", TakesEveryOption),
    _mutant("refuses_unknown_options", "refuses its own default", WrongDefault),
    _mutant("is_recognized", "writes another method than it reads", OtherMethod),
    _mutant("is_recognized", "is read by a method of another layout", Plain, quant_methods=("quark",)),
    _mutant("keeps_branches_or_refuses_them", "writes zeros for branches", SilencesBranches),
    _mutant("reloads_to_the_same_logits", "halves the embedding", HalvesTheEmbedding),
    _mutant("reloads_to_the_same_logits", "drops biases", DropsBiases),
    _mutant("reloads_to_the_same_logits", "takes every head for a tied one", TakesTheHeadForTied),
    _mutant("reloads_to_the_same_logits", "says that codes lie in another order", ForgetsTheOrder),
    _mutant("keeps_settings_of_single_layers", "stores one configuration for all", forgetful_layouts.ForgetsSingleLayers),
    _mutant("keeps_what_runs_with_the_model", "does not store the algorithms", forgetful_layouts.ForgetsAlgorithms),
    _mutant("stores_layers_of_odd_sizes", "writes rows in eights", forgetful_layouts.CutsRows),
    _mutant("reads_packed_codes_in_any_order", "says that codes lie in another order", ForgetsTheOrder),
    _mutant("stores_values_if_it_is_asked_to", "ignores the format of weights", IgnoresTheFormat),
    _mutant("reads_the_files_that_are_there", "remembers what it has read", reader=ObjectRef(forgetful_layouts.RemembersPlaces)),
    _mutant("reads_a_model_that_is_copied", "leaves a lambda on the model", reader=ObjectRef(forgetful_layouts.LeavesALambda)),
    _mutant("runs_from_codes", "drops biases of layers whose weights stay packed", reader=ObjectRef(DropsBiasesOfWhatStaysPacked)),
    _mutant("keeps_codes_and_rounds_scales", "halves the embedding", HalvesTheEmbedding, capabilities={"rounds_scales", "streaming"}),
    _mutant("dequantizes_what_it_wrote", "dequantizes without the scales", dequantizer=ObjectRef(ForgetsTheScales)),
    _mutant("dequantizes_what_it_wrote", "dequantizes to other names", dequantizer=ObjectRef(RenamesWhatItMakes)),
    _mutant("is_inspected", "has nothing to say", inspector=ObjectRef(SaysNothing)),
    _mutant("transformers_reads_it", "has a reader that fails in transformers", reader=ObjectRef(FailsInTransformers)),
    _mutant("honours_or_refuses_common_options", "ignores the format of weights", IgnoresTheFormat),
    _mutant("keeps_the_configuration", "changes a size of the model", ForgetsSizes),
    _mutant("brings_the_tokenizer", "leaves the tokenizer out", WithoutTokenizer),
)
