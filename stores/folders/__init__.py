"""Folders that are written here: published whole, locked while they are, probed for what the disk can do."""
