"""Models: finding and loading checkpoints, slot caches, and heads that draft."""
