"""Between text and token ids: chat templates, tokenizers, text built as tokens arrive, and what is read out of it."""
