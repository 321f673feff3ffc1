"""The commands of quark-workbench, one module each, and the groups of options that they share."""
