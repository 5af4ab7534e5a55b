"""Step times, action traces, and torch's flight recorder."""
