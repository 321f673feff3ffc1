"""List lost and new names of the plugin API; with ``--write``, record the new ones.

python -m tools.plugin_api             # exit status 1 for any difference
python -m tools.plugin_api --write     # adds new names; if a name is lost, add an alias or raise API_VERSION
"""

from __future__ import annotations

import argparse
import json
import sys

from quark.plugins.api_version import API_VERSION
from tools.plugin_api.names import breaks, current, path_of, recorded


def main() -> int:
    """Compare the names with the recorded names, and write new names if the user asks for it."""
    parser = argparse.ArgumentParser(prog="python -m tools.plugin_api", description="Compare the recorded and the current plugin API.")
    parser.add_argument("--write", action="store_true", help="record the new names")
    now, before = current(), recorded(API_VERSION)
    broken = breaks(before, now)
    print(*broken, sep="\n", end="\n" if broken else "")
    if parser.parse_args().write and not broken:
        path_of(API_VERSION).write_text(json.dumps(now, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        return 0
    if new := sorted(now.keys() - before.keys()):
        print(f"not recorded: {', '.join(new)}")
    return int(bool(broken) or now != before)


if __name__ == "__main__":
    sys.exit(main())
