"""What quark-schemes registers."""
