"""A run's metrics and traces turned into one page. No torch."""
