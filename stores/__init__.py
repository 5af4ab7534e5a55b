"""Where bytes are: folders and files on this machine, on the hub, in object stores, read by ranges.

Both reshard and runner read through this package; it imports a client only when an address asks for one.
"""
