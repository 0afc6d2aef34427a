"""The parts of `headstart bench splits`."""
