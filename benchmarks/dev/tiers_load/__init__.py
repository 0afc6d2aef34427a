"""Parts of `headstart bench tiers`: workers whose blocks move, and the saver by itself."""
