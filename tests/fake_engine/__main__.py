"""Run the fake engine: see `tests.fake_engine`."""

from tests.fake_engine.server import main

if __name__ == "__main__":
    main()
