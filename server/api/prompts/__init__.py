"""How prompts are made of bodies, and what bounds them."""
