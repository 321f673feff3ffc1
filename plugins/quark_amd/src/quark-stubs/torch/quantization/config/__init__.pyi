# Written by tools/public_stubs.py: run it again after a change of names; do not edit.
