"""Pipeline schedules as tables of actions: generated, checked, written as CSV, and simulated."""
