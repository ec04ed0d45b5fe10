"""The third stage: generates text with engines."""
