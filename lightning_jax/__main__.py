"""Entry point of `python -m lightning_jax`, the same as the `lightning-jax` command."""

import sys

from lightning_jax.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
