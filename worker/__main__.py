"""Entry point of `python -m worker`, which `headstart worker` runs."""

import os
import signal
import sys

if __name__ == "__main__":  # else Ctrl-C shows a traceback until the worker has its own handlers
    signal.signal(signal.SIGINT, signal.SIG_DFL)
if os.getpid() == 1:  # in a container the kernel drops signals without a handler, and imports take seconds
    signal.signal(signal.SIGTERM, lambda number, _: os._exit(128 + number))

from worker.main import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
