"""Seconds of each module, which `reshard plan --cost` and `balance:time` take instead of FLOPs."""
