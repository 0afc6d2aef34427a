"""`python -m worker`, which is what `headstart worker` becomes."""

import os
import signal
import sys

if os.getpid() == 1:  # of a container: the kernel drops what has no handler, and imports take a while
    signal.signal(signal.SIGTERM, lambda number, _: os._exit(128 + number))

from worker.main import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
