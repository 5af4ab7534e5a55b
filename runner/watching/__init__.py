"""What a run tells: metrics, progress, times, traces."""
