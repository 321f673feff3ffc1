"""``python -m quark``: the program, as `torchrun --nproc-per-node N -m quark …` starts it."""

from quark.cli.main import main

if __name__ == "__main__":
    main()
