"""Stages, what they hand on, and the schedules that run them."""
