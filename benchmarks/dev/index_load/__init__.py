"""The measurements of `headstart bench index`."""
