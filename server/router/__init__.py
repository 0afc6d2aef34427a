"""Which worker gets a request: cost, books, speculative entries, policies."""
