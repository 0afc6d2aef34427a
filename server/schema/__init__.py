"""The request bodies of OpenAI's and Anthropic's routes, checked field by field."""
