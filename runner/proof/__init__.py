"""The proof before step 1: a tiny model of the run's config must train in the run's way as one process trains it."""
