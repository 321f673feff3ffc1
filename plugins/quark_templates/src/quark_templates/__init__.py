"""Model families of quark, one data-only file each."""
