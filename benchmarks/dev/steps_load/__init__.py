"""The engines of `headstart bench steps`."""
