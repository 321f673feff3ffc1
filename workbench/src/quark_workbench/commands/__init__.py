"""The commands of quark-workbench, one module each, and the option groups that they share."""
