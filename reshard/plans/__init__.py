"""The plan of byte ranges: which bytes go where. Pure; reshard.copy carries it out."""
