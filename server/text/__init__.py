"""Between text and token ids: chat templates, tokenizers, the detokenizer, and the parsers of a model's output."""
