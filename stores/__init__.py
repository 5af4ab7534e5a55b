"""Storage: folders and files on this machine, on the hub and in object stores, read by byte ranges.

Both reshard and runner read through this package; it imports a client only when an address requires it.
"""
