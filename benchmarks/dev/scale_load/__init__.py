"""A simulated day with a fleet that grows and shrinks."""
