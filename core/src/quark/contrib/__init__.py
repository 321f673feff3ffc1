"""``quark.contrib``: what AMD Quark's scripts take from there."""
