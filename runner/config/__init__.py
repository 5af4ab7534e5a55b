"""What a run is asked to do: its options, their flags, and the parallel degrees. No torch."""
