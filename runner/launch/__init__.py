"""Starting torchrun: on this machine, and later through a scheduler. No torch is imported here."""
