"""Requests, slots and the step that serves them."""
