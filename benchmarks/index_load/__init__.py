"""What `headstart bench index` measures."""
