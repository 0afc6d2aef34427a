"""The models that this gateway serves: their tokenizers and templates, learnt from their workers."""
