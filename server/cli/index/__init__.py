"""What the shared index holds, for `headstart index` and the ops port."""
