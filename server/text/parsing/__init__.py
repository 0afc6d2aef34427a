"""What a model's text means: reasoning, content and tool calls, told apart as the text arrives.

pieces         what is told apart
json_scan      where a JSON value ends
calls          one {"name": ..., "arguments": ...}
formats        how families write calls
output         reasoning, <think> ... </think>, and all the rest, for one choice
messages       the same as OpenAI's messages and deltas
hermes_prompt  tools for models whose template knows none

However a text is cut, the pieces in a row say the same.
"""
