"""The measurements behind `headstart bench`."""
