"""A run's folder: its state, job record, heartbeats and exit reports. No torch."""
