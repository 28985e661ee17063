"""Not installed."""
