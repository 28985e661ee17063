"""The service: what proves that it runs the new code, and what a measurement of it is worth."""
