"""The entry point of ``python -m quark``. The command ``torchrun --nproc-per-node N -m quark …`` also starts
here."""

import sys
from importlib.metadata import entry_points

if __name__ == "__main__":
    found = entry_points(group="console_scripts", name="quark")
    programs = [entry for entry in found if entry.dist is not None and entry.dist.name == "quark-workbench"]
    if not programs:
        sys.exit("quark: the distribution quark-workbench, which provides this program, is not installed. Run: pip install quark-workbench")
    programs[0].load()()
