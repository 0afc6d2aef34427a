"""A thousand workers without a model, for `headstart bench fleet`."""
