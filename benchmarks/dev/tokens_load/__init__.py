"""The ends of the bench of tokens: a model that costs nothing, an empty hop, and clients that note when tokens come."""
