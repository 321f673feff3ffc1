"""Checks of a scheme's configuration: its functions, options and JSON form."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quark.base.lazy import LazyRef
from quark.config.layer import QLayerConfig, TensorSpec, levels
from quark.config.tensor import QTensorConfig
from quark.errors import ConfigError
from quark.plugins.options import REQUIRED
from quark_devkit.check import assume, check, raises, require
from quark_devkit.option_effects import require_effects
from quark_devkit.subject import Subject
from quark_tiny_model import tiny_template

_NO_OPTION = "an_option_that_no_scheme_has"
_CALLS = 100


def _builds(subject: Subject) -> dict[str, Callable[..., Any]]:
    """Return the functions that the record references, by the name of the field."""
    fields = ("config", "kv_cache", "attention")
    return {field: subject.load(field) for field in fields if getattr(subject.record, field) is not None}


def _specs(built: Any) -> list[TensorSpec]:
    """Return the specs in a configuration of a layer or of a tensor."""
    if isinstance(built, QLayerConfig):
        return [spec for spec in (built.weight, built.input_tensors, built.output_tensors, built.bias) if spec is not None]
    return [built]


@check("scheme")
def builds_a_configuration(subject: Subject) -> None:
    """Without arguments, the record's functions build a QLayerConfig that quantizes something, and a
    QTensorConfig for attention. For the KV cache, a function builds a QTensorConfig or a list of levels.
    """
    for field, build in _builds(subject).items():
        built = build()
        wanted = QLayerConfig if field == "config" else QTensorConfig
        parts = built if field == "kv_cache" and isinstance(built, list) and built else [built]
        require(all(isinstance(part, wanted) for part in parts), f"builds {built!r} as {field}, not a {wanted.__name__}")
        require(field != "config" or _specs(built), "builds a configuration that quantizes nothing")


@check("scheme")
def builds_it_afresh(subject: Subject) -> None:
    """Each call builds a new, equal configuration, also after many calls, so that a change to one
    configuration does not affect the next.
    """
    for field, build in _builds(subject).items():
        first = build()
        for _ in range(_CALLS):
            second = build()
            require(first == second, f"builds a different {field} the next time")
        one, other = ({id(level) for spec in _specs(built) for level in levels(spec)} for built in (first, second))
        is_own = first is not second and not one & other
        require(is_own, f"returns the same {field} object twice: a caller that changes it changes the scheme")


@check("scheme")
def imports_no_torch(subject: Subject) -> None:
    """The configuration is built without importing torch, so that listings are quick."""
    record = subject.record
    assume(isinstance(record.config, LazyRef), "it is registered as an object, not by name")
    program = (
        "import importlib, operator, sys\n"
        f"build = operator.attrgetter({record.config.attribute!r})(importlib.import_module({record.config.module!r}))\n"
        "build()\n"
        "print('torch' in sys.modules)"
    )
    # A package may have been imported from a path that only this process searches.
    loaded = getattr(sys.modules.get(record.config.module.partition(".")[0]), "__path__", ())
    places = [*(str(Path(place).parent) for place in loaded), *filter(None, sys.path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(places)}
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=False)
    require(run.returncode == 0, f"cannot be built in a fresh process: {run.stderr.strip().splitlines()[-1:]}")
    require(run.stdout.split()[-1] == "False", f"imports torch when {record.config} is imported or called")


@check("scheme")
def refuses_unknown_options(subject: Subject) -> None:
    """The scheme refuses unknown options with an error that names them."""
    try:
        tiny_template().get_config(subject.lookup_name, scheme_options={_NO_OPTION: 1})
    except ConfigError as error:
        require(_NO_OPTION in str(error), f"refuses an unknown option without naming it: {error}")
    else:
        require(False, f"accepts the unknown option '{_NO_OPTION}'")
    is_refused = raises(TypeError, subject.load("config"), **{_NO_OPTION: 1})
    require(is_refused, f"has a function that accepts any keyword, such as '{_NO_OPTION}'")


@check("scheme")
def lists_its_options(subject: Subject) -> None:
    """Every option has a default and a description, and an explicit default gives the same configuration as
    leaving the option out."""
    options = subject.registry.options(subject.lookup_name)
    build = subject.load("config")
    for option in options:
        require(option.default is not REQUIRED, f"has the option '{option.name}' without a default")
        require(option.help, f"has the option '{option.name}', which its docstring does not describe under Args")
        same = build(**{option.name: option.default}) == build()
        require(same, f"builds a different configuration with {option.name}={option.default!r}, its default, than without it")
        chosen = tiny_template().get_config(subject.lookup_name, scheme_options={option.name: option.default})
        require(chosen.global_quant_config == build(), f"does not receive {option.name}={option.default!r} from scheme_options")


@check("scheme", since=2)
def heeds_its_options(subject: Subject) -> None:
    """Different values of an option build different configurations, whatever the boolean options are. A value
    may be refused instead, and an option may be declared to change only the cost."""
    build = subject.load("config")
    require_effects(subject.registry.options(subject.lookup_name), lambda values: [build(**values)])


@check("scheme")
def comes_back_from_json(subject: Subject) -> None:
    """The configurations are equal after they are written to JSON and read back, as checkpoints need."""
    for field, build in _builds(subject).items():
        built = build()
        whole = QLayerConfig(output_tensors=built) if isinstance(built, list) else built
        back, built = type(whole).from_dict(json.loads(json.dumps(whole.to_dict()))), whole
        require(back == built, f"has a {field} that a round trip through JSON changes: {built} becomes {back}")


@check("scheme")
def describes_itself(subject: Subject) -> None:
    """The record has a one-line summary and names each client once."""
    record = subject.record
    require(record.summary.strip() and "\n" not in record.summary, f"has the summary {record.summary!r}, not one line")
    require(all(client.strip() for client in record.clients), "has a client without a name")
    require(len(set(record.clients)) == len(record.clients), f"names a client twice: {', '.join(record.clients)}")
