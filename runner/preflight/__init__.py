"""What is checked before ranks start, and again by each rank."""
