"""Who sent a request, what they may use, and how much of it."""
