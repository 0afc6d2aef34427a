"""`python -m worker`, which is what `headstart worker` becomes."""

import sys

from worker.main import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
