"""One request from its checked prompts to its last token, on however many workers."""
