"""Parts of `headstart bench first-token`."""
