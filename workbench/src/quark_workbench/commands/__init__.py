"""The commands of quark-workbench and the groups of options that they share. Each command is a module."""
