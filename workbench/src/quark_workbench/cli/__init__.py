"""The command line: ``quark …``. Command modules import nothing heavy before their command runs."""
