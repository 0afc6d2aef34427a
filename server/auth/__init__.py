"""Who asks, what they may, and how much of it."""
