"""How fast, side by side: this engine and others on the same prompts, in turn, in one process."""
