"""Ranks as processes: how they meet, are watched over, fail together and exit."""
