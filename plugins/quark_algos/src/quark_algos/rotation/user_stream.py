"""The residual stream that the user describes in the ``scaling_layers`` of a rotation.

The names are looked up in the model. A check makes sure that the names include all modules that read or write
the residual stream, and the right norm for each reader.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import attrs
from torch import nn

from quark.base.names import closest, folded
from quark.config.architecture import Architecture
from quark.errors import ConfigError, UnsupportedError
from quark_algos.mappings.mapping import linear_layers, writers_before_blocks, writers_of_attention, writers_of_mlp
from quark_algos.mappings.resolve import input_axis, submodule
from quark_algos.rotation.config import RotationConfig
from quark_algos.rotation.norm_form import with_form_of
from quark_algos.rotation.residual_stream import Reading, Stream, check, matching, norms_and_readers, see_single_experts

__all__ = ["PARTS", "Entry", "Names", "UserStream", "entries_of", "user_stream"]

PARTS = ("first_layer", "middle_layers", "last_layer")
"""The keys of ``scaling_layers``. They have the entries for the first block, the entries for each other
block, and additional entries for the last block.
"""

_STREAM = ("decoder_blocks", "embeddings", "final_norm", "head", "attention_norm", "mlp_norm", "attention_inputs")
_Layers = Mapping[str, nn.Module]
_AS_KNOWN = "Leave scaling_layers empty to use the layers of the model's architecture"

_KEYS, _ONLINE = ("prev_modules", "norm_module", "next_modules"), "target_modules"


@attrs.frozen
class Entry:
    """One entry of ``scaling_layers``. All names in an entry are full names.

    In a name, ``layer_id`` stands for the number of a block, and ``pre_layer_id`` for the number of the block
    before it.

    Attributes:
        where: Position of the entry in ``scaling_layers``. Error messages contain this position.
        writers: Names of the layers that write to the residual stream. A star matches one part of a name.
        norm: Name of the norm through which the layers in ``readers`` read the stream.
        readers: Names of the layers that read the stream. A star matches one part of a name.
    """

    where: str
    writers: tuple[str, ...]
    norm: str
    readers: tuple[str, ...]

    @classmethod
    def read(cls, where: str, entry: Any) -> Entry:
        """Return the `Entry` for a dict in the format of AMD Quark. Raise ConfigError if ``entry`` has
        another format.
        """
        if not isinstance(entry, Mapping) or any(key not in entry for key in _KEYS):
            raise ConfigError(f"rotation, {where}: an entry must be a dict with {', '.join(_KEYS)}, not {entry!r}")
        for key in entry:
            if key not in (*_KEYS, _ONLINE):
                near = closest(str(key), (*_KEYS, _ONLINE))
                raise ConfigError(f"rotation, {where}: an entry has no key {key!r}" + (f"; did you mean {near!r}?" if near else ""))
        writers, norm, readers = (entry[key] for key in _KEYS)
        for key, names in (("prev_modules", writers), ("next_modules", readers)):
            if not isinstance(names, list | tuple) or not all(isinstance(name, str) and name for name in names):
                raise ConfigError(f"rotation, {where}: '{key}' must be a list of full names, not {names!r}")
        if not isinstance(norm, str) or not norm or "*" in norm:
            raise ConfigError(f"rotation, {where}: 'norm_module' must be one full name, not {norm!r}")
        return cls(where, tuple(writers), norm, tuple(readers))

    @property
    def names(self) -> tuple[str, ...]:
        """All names in this entry."""
        return (*self.writers, self.norm, *self.readers)


def entries_of(scaling_layers: Any) -> dict[str, tuple[Entry, ...]]:
    """Return the entries of a rotation's ``scaling_layers``, as a dictionary from part to entries.

    Args:
        scaling_layers: A dict with the keys `PARTS`, as in AMD Quark.

    Returns: The dictionary. It is empty if ``scaling_layers`` or all its parts are empty.

    Raises:
        ConfigError: ``scaling_layers`` has another format.
    """
    if not scaling_layers or (isinstance(scaling_layers, Mapping) and not any(scaling_layers.values())):
        return {}
    if not isinstance(scaling_layers, Mapping) or set(scaling_layers) != set(PARTS):
        has = f"has {', '.join(map(str, scaling_layers))}" if isinstance(scaling_layers, Mapping) else "is a list"
        raise ConfigError(
            f"scaling_layers of a rotation must be a dict with a list for {', '.join(PARTS)}, but this {has}. Leave scaling_layers empty "
            "to use the layers of the model's architecture"
        )
    return {part: tuple(Entry.read(f"{part}[{i}]", entry) for i, entry in enumerate(scaling_layers[part])) for part in PARTS}


@attrs.frozen
class Names:
    """The names of the modules that read or write the residual stream, in one block or outside the blocks.

    Names in a block are relative to the block. Names outside the blocks are full names.

    Attributes:
        writers: The names of the projections and embeddings that write to the stream. They are the keys of a
            dictionary.
        norm_of: A dictionary from the name of each reader to the name of its norm.
    """

    writers: dict[str, None] = attrs.field(factory=dict)
    norm_of: dict[str, str] = attrs.field(factory=dict)

    def resolve(self, module: nn.Module) -> Stream:
        """Return the modules with these names. ``module`` is the block, or the model for names outside the
        blocks.
        """
        readers: dict[str, list[str]] = defaultdict(list)
        for reader, norm in self.norm_of.items():
            readers[norm].append(reader)
        readings = (Reading(norm, module.get_submodule(norm), matching(module, names)) for norm, names in readers.items())
        return Stream(matching(module, self.writers), tuple(readings))


@attrs.frozen(eq=False)
class UserStream:
    """The residual stream of one model, as the user describes it.

    Attributes:
        facts: Architecture of the model. If the architecture did not state the form of the norms, the form
            was measured and added.
        names: A dictionary from the full name of each block to the names in the block. The key ``""`` is for
            the names outside the blocks.
    """

    facts: Architecture
    names: Mapping[str, Names]


def user_stream(settings: RotationConfig, model: nn.Module, facts: Architecture, width: int) -> UserStream | None:
    """Return the residual stream that ``scaling_layers`` describe.

    Return None if ``scaling_layers`` are empty or equal to the default for the architecture.

    If the architecture names all modules that read or write the residual stream, ``scaling_layers`` must name
    all of these modules, too. If the architecture does not name them, for example because the model has no
    template, the completeness of ``scaling_layers`` cannot be checked.

    Args:
        settings: The settings of the rotation.
        model: The whole model. Its norms must have their weights.
        facts: Architecture of the model.
        width: Number of channels of the residual stream.

    Raises:
        ConfigError: ``scaling_layers`` do not have the format of AMD Quark, a name does not exist in the
            model, a module that reads or writes the stream is missing, a module is listed with a wrong norm,
            or a module does not have the width of the stream.
        UnsupportedError: The architecture cannot be rotated, its decoder blocks are not known, or the form of
            its norms is not known.
    """
    entries = entries_of(settings.scaling_layers)
    derived = RotationConfig.for_architecture(facts)
    if not entries or (derived is not None and entries == entries_of(derived.scaling_layers)):
        return None
    is_known = _known_in_full(facts)
    if facts.decoder_blocks is None:
        raise UnsupportedError(f"{facts.model_type} cannot be rotated, because its decoder blocks are not known. Register a template")
    reader = _Reader(model, facts.decoder_blocks)
    usual = entries_of(derived.scaling_layers) if derived is not None else {}
    reader.read(entries, frozenset(chain.from_iterable(e.names for e in chain.from_iterable(usual.values()))))
    streams = {block: names.resolve(model.get_submodule(block)) for block, names in reader.names.items()}
    _see_shapes(streams, width)
    if is_known:
        _see_closed(model, facts, streams)
    else:
        facts = with_form_of(facts, [(f"{name}.{r.name}".lstrip("."), r.norm) for name, s in streams.items() for r in s.readings], width)
    return UserStream(facts, reader.names)


class _Reader:
    """Collects, for each block, the names that the entries of ``scaling_layers`` contain.

    Attributes:
        names: A dictionary from the full name of each block to the names in the block, in the order of the
            blocks. The key ``""`` is for the names outside the blocks.
    """

    def __init__(self, model: nn.Module, blocks: str) -> None:
        self._model = model
        self._blocks = blocks
        self._numbers = range(len(list(model.get_submodule(blocks).children())))
        self.names = {block: Names() for block in ("", *(f"{blocks}.{i}" for i in self._numbers))}
        self._unread: dict[tuple[str, str], Entry] = {}

    def read(self, entries: Mapping[str, Sequence[Entry]], usual: frozenset[str]) -> None:
        """Add the names of all entries.

        Names in ``usual`` may be missing in the model, because not every model has all modules of its
        architecture.
        """
        only_first = len(self._numbers) == 1
        for entry in chain.from_iterable(of_part for part, of_part in entries.items() if not (only_first and part == "middle_layers")):
            for template in entry.names:
                if template not in usual and not any(True for i in self._numbers for _ in self._matches(template, i)):
                    raise ConfigError(f"rotation, {entry.where}: no block of this model has '{template}'{self._hint(template)}")
        last = self._numbers[-1]
        for i in self._numbers:
            here = (*entries["middle_layers" if i else "first_layer"], *(entries["last_layer"] if i == last else ()))
            for entry in here:
                self._add(entry, i)
        for (block, name), entry in self._unread.items():
            if name not in self.names[block].norm_of:
                raise ConfigError(f"rotation, {entry.where}: the model has '{_full(block, name)}', but not the norm '{entry.norm}'")

    def _add(self, entry: Entry, number: int) -> None:
        for template in entry.writers:
            for block, name in self._matches(template, number):
                self.names[block].writers[name] = None
        norms = list(self._matches(entry.norm, number))
        for block, name in chain.from_iterable(self._matches(template, number) for template in entry.readers):
            if not norms:
                self._unread[block, name] = entry
                continue
            ((block_of_norm, norm),) = norms
            if block_of_norm != block:
                raise UnsupportedError(
                    f"rotation, {entry.where}: '{_full(block, name)}' and its norm '{_full(block_of_norm, norm)}' are not in the same "
                    f"block. Name a norm in the same block"
                )
            other = self.names[block].norm_of.setdefault(name, norm)
            if other != norm:
                raise ConfigError(
                    f"rotation, {entry.where}: '{_full(block, name)}' has the norm '{norm}', but in another entry the norm '{other}'. Name "
                    f"only one norm"
                )

    def _matches(self, template: str, number: int) -> Iterator[tuple[str, str]]:
        """Yield the modules that match a name after ``number`` has replaced ``layer_id`` in it.

        Each module is a pair of the full name of its block and the name of the module in the block.
        """
        name = template.replace("pre_layer_id", str(number - 1)).replace("layer_id", str(number))
        inside = name.removeprefix(f"{self._blocks}.")
        first, _, relative = inside.partition(".")
        if inside == name or not relative:
            yield from (("", full) for full in matching(self._model, (name,)))
            return
        block = f"{self._blocks}.{first}"
        module = submodule(self._model, block)
        if module is not None:
            yield from ((block, match) for match in matching(module, (relative,)))

    def _hint(self, template: str) -> str:
        known = {name for name, _ in self._model.named_modules()}
        numbered = (name.removeprefix(f"{self._blocks}.").partition(".") for name in known if name.startswith(f"{self._blocks}."))
        which = "pre_layer_id" if "pre_layer_id" in template else "layer_id"
        near = closest(template, {*known, *(f"{self._blocks}.{which}.{rest}" for _, _, rest in numbered if rest)})
        return f"; the closest name is '{near}'" if near else ""


def _known_in_full(facts: Architecture) -> bool:
    """Return whether the architecture names all modules that read or write the residual stream.

    Raises:
        UnsupportedError: The architecture cannot be rotated, whatever ``scaling_layers`` contain.
    """
    named = {name: getattr(facts, name) for name in _STREAM}
    supposed: dict[str, Any] = {name: value or "?" for name, value in named.items()}
    check(attrs.evolve(facts, **supposed))
    return all(named.values())


def _see_shapes(streams: Mapping[str, Stream], width: int) -> None:
    """Check that each block has writers and readers, and that the weights of both are matrices of the
    stream's width.

    Args:
        streams: A dictionary from the full name of each block to its stream. The key ``""`` is for the
            modules outside the blocks.
        width: Number of channels of the residual stream.

    Raises:
        ConfigError: A block has no writer or no reader, or the weight of a module is not a matrix of this
            width.
    """
    for block, stream in streams.items():
        if not stream.writers or not stream.readings:
            verb, where = "writes to" if not stream.writers else "reads", f"in {block}" if block else "outside the blocks"
            raise ConfigError(f"rotation: scaling_layers are incomplete: no layer {verb} the residual stream {where}. {_AS_KNOWN}")
        readers = {name: module for reading in stream.readings for name, module in reading.readers.items()}
        for names, is_writer in ((stream.writers, True), (readers, False)):
            for name, module in names.items():
                _see_width(_full(block, name), module, width, is_writer=is_writer)


def _see_closed(model: nn.Module, facts: Architecture, streams: Mapping[str, Stream]) -> None:
    """Check that the streams have exactly the writers and readers that the architecture names.

    Args:
        model: The whole model.
        facts: The architecture of the model. It must name all writers and readers (`_known_in_full`).
        streams: A dictionary from the full name of each block to its stream. The key ``""`` is for the
            modules outside the blocks.

    Raises:
        ConfigError: A module is missing, is listed with another norm, or does not read or write the stream.
        UnsupportedError: A block has fused experts.
    """
    left_out: list[str] = []
    for block, stream in streams.items():
        module = model.get_submodule(block)
        if block:
            see_single_experts(module, facts, stream.writers)
            writer_names, reader_names = (*writers_of_attention(facts), *writers_of_mlp(facts)), norms_and_readers(facts)
        else:
            writer_names, reader_names = writers_before_blocks(facts), {facts.final_norm or "": (facts.head or "",)}
        writers = matching(module, writer_names)
        readers = {norm: matching(module, names) for norm, names in reader_names.items()}
        _see_parts(block, module, facts, stream, writers, readers)
        written, read = set(stream.writers.values()), {m for reading in stream.readings for m in reading.readers.values()}
        left_out += [_full(block, name) for name, writer in writers.items() if writer not in written]
        left_out += [_full(block, name) for layers in readers.values() for name, reader in layers.items() if reader not in read]
    if left_out:
        raise ConfigError(
            f"rotation: scaling_layers lack {folded(left_out)}. These layers read or write the residual stream, too, so the rotation would "
            f"change the outputs of the model. {_AS_KNOWN}"
        )


def _see_parts(
    block: str, module: nn.Module, facts: Architecture, stream: Stream, known_writers: _Layers, known_readers: Mapping[str, _Layers]
) -> None:
    """Check that each writer in ``stream`` writes to the residual stream, and that each reader has the right
    norm.

    The architecture determines which modules write to the stream, and the norm of each reader.
    """
    writers = set(known_writers.values())
    norm_of = {reader: norm for norm, layers in known_readers.items() for reader in layers.values()}
    others = set(matching(module, linear_layers(facts)).values()) if block else set()
    for name, writer in stream.writers.items():
        if writer not in writers and (writer in others or writer in norm_of):
            raise ConfigError(f"rotation: '{block}.{name}' of 'prev_modules' does not write to the residual stream. {_AS_KNOWN}")
    for reading in stream.readings:
        for name, reader in reading.readers.items():
            norm = norm_of.get(reader)
            if norm is None and (reader in others or reader in writers):
                raise ConfigError(f"rotation: '{_full(block, name)}' of 'next_modules' does not read the residual stream. {_AS_KNOWN}")
            # If the model does not have this norm, it is a variant in which another norm is used instead.
            actual = None if norm is None else submodule(module, norm)
            if actual is not None and actual is not reading.norm:
                raise ConfigError(
                    f"rotation: '{_full(block, name)}' reads the residual stream through '{norm}', not '{reading.name}'. {_AS_KNOWN}"
                )


def _see_width(name: str, module: nn.Module, width: int, *, is_writer: bool) -> None:
    weight = getattr(module, "weight", None)
    if not isinstance(weight, nn.Parameter) or weight.ndim != 2:
        raise ConfigError(
            f"rotation: '{name}' ({type(module).__name__}) has no single weight matrix, so no rotation can be folded into it. Leave it out"
        )
    axis = 1 if isinstance(module, nn.Embedding) else 1 - input_axis(module) if is_writer else input_axis(module)
    if weight.shape[axis] != width:
        side = "outputs" if is_writer else "inputs"
        raise ConfigError(f"rotation: '{name}' has {weight.shape[axis]} {side}, but the residual stream has {width} channels. {_AS_KNOWN}")


def _full(block: str, name: str) -> str:
    return f"{block}.{name}" if block else name
