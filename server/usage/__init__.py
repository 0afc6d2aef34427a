"""Use by tenant and key: an account for each request, counters, and the usage log."""
