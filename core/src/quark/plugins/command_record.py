"""CommandRecord: a command of the program ``quark``."""

from __future__ import annotations

import attrs

from quark.base.lazy import Reference, as_reference
from quark.plugins.record_fields import function_reference
from quark.plugins.records import Record

__all__ = ["CommandRecord"]


@attrs.frozen(kw_only=True)
class CommandRecord(Record):
    """A command of the program, called as ``quark NAME``. Its ``summary`` is its line in ``quark --help``.

    Attributes:
        command: Reference to a function, whose annotated arguments are the arguments and options of the
            command as typer reads them, or to a ``typer.Typer``, whose commands are called as
            ``quark NAME COMMAND``. It is loaded when the command is called.
        group: Heading under which ``quark --help`` lists it; a heading of its own keeps the commands of a
            plugin together.
    """

    command: Reference = attrs.field(converter=as_reference, metadata=function_reference())
    group: str = attrs.field(default="Commands", validator=attrs.validators.instance_of(str))
