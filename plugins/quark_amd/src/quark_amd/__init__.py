"""AMD Quark's public interface: its import paths, and the parts that quark-core does not have."""
