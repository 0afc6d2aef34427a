"""The request bodies of OpenAI's and Anthropic's routes, checked field by field.

requests       one class a route, and their decoder      fields         fields that several routes share
messages       the bodies of Anthropic's routes          tools          tools, their names and tool_choice
intent         a chat in one form for all chat APIs      blocks, thoughts  parts of messages
decoding       JSON to structs, errors by field          field_table    refused fields, from `refused_fields.toml`
grammar_schema, schema_references, patterns              JSON Schemas of clients for grammars
"""
