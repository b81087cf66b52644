"""Training an attached head for a trunk that ships none, by self-distillation."""
