"""What clients may send: OpenAI's bodies, checked field by field."""
