"""The request bodies of OpenAI's routes, checked field by field."""
