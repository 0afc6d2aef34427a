"""The replays of `headstart bench route`, and their figures."""
