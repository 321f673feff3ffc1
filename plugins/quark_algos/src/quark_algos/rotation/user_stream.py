"""The residual stream as ``scaling_layers`` of a rotation have it, written by hand; names are found in the model, and checked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import attrs
from torch import nn

from quark.config.architecture import Architecture
from quark.errors import ConfigError, UnsupportedError
from quark.names import closest
from quark_algos.mappings.resolve import submodule
from quark_algos.rotation.closed_stream import known_in_full, see_closed, see_shapes
from quark_algos.rotation.config import RotationConfig
from quark_algos.rotation.norm_form import with_form_of
from quark_algos.rotation.residual_stream import Reading, Stream, matching

__all__ = ["PARTS", "Entry", "HandWritten", "Names", "entries_of", "hand_written"]

PARTS = ("first_layer", "middle_layers", "last_layer")
"""Of ``scaling_layers``: what counts for the first block, for each of the others, and once more for the last."""

_KEYS, _ONLINE = ("prev_modules", "norm_module", "next_modules"), "target_modules"


@attrs.frozen
class Entry:
    """One entry, as documented: full names, in which ``layer_id`` stands for a block's number and ``pre_layer_id`` for the one before.

    Attributes:
        where: Which entry it is, for messages.
        writers: What writes to the residual stream; a star stands for one part of a name.
        norm: Through which it is read.
        readers: What reads it through that norm; stars likewise.
    """

    where: str
    writers: tuple[str, ...]
    norm: str
    readers: tuple[str, ...]

    @classmethod
    def read(cls, where: str, entry: Any) -> Entry:
        """Of the documented dict; raises ConfigError for anything else."""
        if not isinstance(entry, Mapping) or any(key not in entry for key in _KEYS):
            raise ConfigError(f"rotation, {where}: an entry is a dict with {', '.join(_KEYS)}, and this one is {entry!r}")
        for key in entry:
            if key not in (*_KEYS, _ONLINE):
                near = closest(str(key), (*_KEYS, _ONLINE))
                raise ConfigError(f"rotation, {where}: an entry has no key {key!r}" + (f"; did you mean {near!r}?" if near else ""))
        writers, norm, readers = (entry[key] for key in _KEYS)
        for key, names in (("prev_modules", writers), ("next_modules", readers)):
            if not isinstance(names, list | tuple) or not all(isinstance(name, str) and name for name in names):
                raise ConfigError(f"rotation, {where}: '{key}' is a list of full names, and this one is {names!r}")
        if not isinstance(norm, str) or not norm or "*" in norm:
            raise ConfigError(f"rotation, {where}: 'norm_module' is one full name, and this one is {norm!r}")
        return cls(where, tuple(writers), norm, tuple(readers))

    @property
    def names(self) -> tuple[str, ...]:
        """All that it names."""
        return (*self.writers, self.norm, *self.readers)


def entries_of(scaling_layers: Any) -> dict[str, tuple[Entry, ...]]:
    """Read ``scaling_layers`` of a rotation.

    Args:
        scaling_layers: As documented, a dict with `PARTS`; what is empty says nothing.

    Returns:
        The entries by part; none where nothing is said.

    Raises:
        ConfigError: It has another form.
    """
    if not scaling_layers or (isinstance(scaling_layers, Mapping) and not any(scaling_layers.values())):
        return {}
    if not isinstance(scaling_layers, Mapping) or set(scaling_layers) != set(PARTS):
        has = f"has {', '.join(map(str, scaling_layers))}" if isinstance(scaling_layers, Mapping) else "is a list"
        raise ConfigError(
            f"scaling_layers of a rotation are a dict with {', '.join(PARTS)}, each a list, and this {has}. Leave them empty to have what "
            "the model's family has"
        )
    return {part: tuple(Entry.read(f"{part}[{i}]", entry) for i, entry in enumerate(scaling_layers[part])) for part in PARTS}


@attrs.frozen
class Names:
    """What touches the stream in one place, a block or all around the blocks, by names relative to it.

    Attributes:
        writers: Of projections and embeddings.
        readings: Of norms, each with those of its readers.
    """

    writers: tuple[str, ...]
    readings: Mapping[str, tuple[str, ...]]

    def of(self, place: nn.Module) -> Stream:
        """The modules themselves."""
        readings = (Reading(norm, place.get_submodule(norm), matching(place, readers)) for norm, readers in self.readings.items())
        return Stream(matching(place, self.writers), tuple(readings))


@attrs.frozen(eq=False)
class HandWritten:
    """The residual stream of one model.

    Attributes:
        facts: About the family; where they do not tell what its norms compute, that is found by trying.
        outside: All around the blocks.
        blocks: By full name of a block.
    """

    facts: Architecture
    outside: Names
    blocks: Mapping[str, Names]


def hand_written(settings: RotationConfig, model: nn.Module, facts: Architecture, width: int) -> HandWritten | None:
    """What ``scaling_layers`` say about a model, if that is anything else than the family's facts say.

    Where the facts name all that writes to the residual stream or reads it, none of these may be left out. Where they do not, in a family
    that nothing is known of but where its blocks are, what is written is taken as it is.

    Args:
        settings: Those of the rotation.
        model: The whole model; norms have their weights.
        facts: About its family.
        width: Of the residual stream.

    Raises:
        ConfigError: The form is not the documented one; a name is nowhere in the model; a module that touches the stream is left out, is
            read through another norm, or does not fit.
        UnsupportedError: The family cannot be rotated; or its blocks, or what its norms compute, are not known.
    """
    entries = entries_of(settings.scaling_layers)
    derived = RotationConfig.for_architecture(facts)
    if not entries or (derived is not None and entries == entries_of(derived.scaling_layers)):
        return None
    is_known = known_in_full(facts)
    if facts.decoder_blocks is None:
        raise UnsupportedError(f"{facts.model_type} cannot be rotated: where its decoder blocks are is not known; register a template")
    reader = _Reader(model, facts.decoder_blocks)
    usual = entries_of(derived.scaling_layers) if derived is not None else {}
    reader.read(entries, frozenset(chain.from_iterable(e.names for e in chain.from_iterable(usual.values()))))
    places = {name: (model.get_submodule(name), names) for name, names in reader.by_place().items()}
    streams = {name: names.of(place) for name, (place, names) in places.items()}
    see_shapes(streams, width)
    if is_known:
        see_closed(model, facts, streams)
    else:
        facts = with_form_of(facts, [(f"{name}.{r.name}".lstrip("."), r.norm) for name, s in streams.items() for r in s.readings], width)
    found = reader.by_place()
    return HandWritten(facts, found.pop(""), found)


class _Reader:
    """Sorts what entries name by the place where it is: ``""`` outside the blocks, or the full name of a block."""

    def __init__(self, model: nn.Module, blocks: str) -> None:
        self._model = model
        self._blocks = blocks
        self._numbers = range(len(list(model.get_submodule(blocks).children())))
        self._writers: dict[str, dict[str, None]] = {place: {} for place in ("", *(f"{blocks}.{i}" for i in self._numbers))}
        self._norm_of: dict[str, dict[str, str]] = {place: {} for place in self._writers}
        self._unread: dict[tuple[str, str], Entry] = {}

    def read(self, entries: Mapping[str, Sequence[Entry]], usual: frozenset[str]) -> None:
        """Take in all entries; names in ``usual`` need not be in the model, since not every model of a family has all of them."""
        only_first = len(self._numbers) == 1
        for entry in chain.from_iterable(found for part, found in entries.items() if not (only_first and part == "middle_layers")):
            for template in entry.names:
                if template not in usual and not any(True for i in self._numbers for _ in self._found(template, i)):
                    raise ConfigError(f"rotation, {entry.where}: no block of this model has '{template}'{self._hint(template)}")
        last = self._numbers[-1]
        for i in self._numbers:
            here = (*entries["middle_layers" if i else "first_layer"], *(entries["last_layer"] if i == last else ()))
            for entry in here:
                self._take(entry, i)
        for (place, name), entry in self._unread.items():
            if name not in self._norm_of[place]:
                raise ConfigError(f"rotation, {entry.where}: '{_full(place, name)}' is there, but its norm, '{entry.norm}', is not")

    def by_place(self) -> dict[str, Names]:
        """What was found, in the order of the places."""
        made = {}
        for place, writers in self._writers.items():
            readings: dict[str, list[str]] = {}
            for reader, norm in self._norm_of[place].items():
                readings.setdefault(norm, []).append(reader)
            made[place] = Names(tuple(writers), {norm: tuple(readers) for norm, readers in readings.items()})
        return made

    def _take(self, entry: Entry, number: int) -> None:
        for template in entry.writers:
            for place, name in self._found(template, number):
                self._writers[place][name] = None
        norms = list(self._found(entry.norm, number))
        for place, name in chain.from_iterable(self._found(template, number) for template in entry.readers):
            if not norms:
                self._unread[place, name] = entry
                continue
            ((at, norm),) = norms
            if at != place:
                raise UnsupportedError(
                    f"rotation, {entry.where}: '{_full(place, name)}' and its norm '{_full(at, norm)}' are not in the same block; what is "
                    "between blocks cannot be rotated"
                )
            other = self._norm_of[place].setdefault(name, norm)
            if other != norm:
                raise ConfigError(
                    f"rotation, {entry.where}: '{_full(place, name)}' reads through '{norm}', and elsewhere through '{other}'"
                )

    def _found(self, template: str, number: int) -> Iterator[tuple[str, str]]:
        """Places and relative names of the modules that a name means in a block."""
        name = template.replace("pre_layer_id", str(number - 1)).replace("layer_id", str(number))
        inside = name.removeprefix(f"{self._blocks}.")
        first, _, relative = inside.partition(".")
        if inside == name or not relative:
            yield from (("", found) for found in matching(self._model, (name,)))
            return
        place = f"{self._blocks}.{first}"
        block = submodule(self._model, place)
        if block is not None:
            yield from ((place, found) for found in matching(block, (relative,)))

    def _hint(self, template: str) -> str:
        known = {name for name, _ in self._model.named_modules()}
        numbered = (name.removeprefix(f"{self._blocks}.").partition(".") for name in known if name.startswith(f"{self._blocks}."))
        which = "pre_layer_id" if "pre_layer_id" in template else "layer_id"
        near = closest(template, {*known, *(f"{self._blocks}.{which}.{rest}" for _, _, rest in numbered if rest)})
        return f"; the closest name is '{near}'" if near else ""


def _full(place: str, name: str) -> str:
    return f"{place}.{name}" if place else name
