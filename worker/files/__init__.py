"""The files of a model: their identity, the tokenizer in them, and why they cannot be used. Imports no torch."""
