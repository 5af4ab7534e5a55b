"""Pipeline stages, their inputs and outputs, and the schedules that run them."""
