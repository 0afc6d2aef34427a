"""OpenAI's and Anthropic's routes: decode, check and tokenise a body, run it, and format the response."""
