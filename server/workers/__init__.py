"""The workers as the gateway sees them: who is there, how they are asked, and what their trouble means."""
