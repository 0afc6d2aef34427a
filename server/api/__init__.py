"""OpenAI's and Anthropic's routes: decode, check and tokenise a body, let it be generated, and format the response."""
