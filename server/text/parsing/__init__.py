"""What a model's text means: reasoning, content and tool calls, told apart as the text arrives.

pieces     what is told apart           reasoning   <think> ... </think>
json_scan  where a JSON value ends      calls       one {"name": ..., "arguments": ...}
formats    how families write calls     output      all of it, for one choice

However a text is cut, the pieces in a row say the same.
"""
