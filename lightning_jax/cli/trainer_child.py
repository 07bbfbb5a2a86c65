"""Script that runs `lightning-jax` as one process of a trainer.

It ends with the process that started it: its standard input is a socket, which closes when that
process ends, however that happens.
"""

import os
import sys
import threading

LOST = 1  # exit status


def _exit_at_end_of_input() -> None:
    while os.read(0, 4096):
        pass
    os._exit(LOST)


if __name__ == "__main__":
    threading.Thread(target=_exit_at_end_of_input, daemon=True).start()
    from lightning_jax.cli.main import main

    sys.exit(main(sys.argv[1:]))
