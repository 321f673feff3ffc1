"""Package of AMD Quark's public module `config`."""
