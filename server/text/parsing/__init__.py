"""Read reasoning, content and tool calls out of a model's text as it arrives. How the text is cut does not matter.

reader     one call object, and where a JSON value ends
formats    how model families write calls
messages   the parser of one choice, and OpenAI's messages and deltas
"""
