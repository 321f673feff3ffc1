# Written by tools/public_stubs.py: run it again after a change of names; do not edit.
from quark.numbers.observer import Observer
from typing import Any
from quark.torch._names_of_plugins import *
ObserverBase = Observer
def __getattr__(name: str) -> Any: ...  # names of other plugins
