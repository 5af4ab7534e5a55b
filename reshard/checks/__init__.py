"""What may be wrong with any checkpoint, ours or not: checks that name every problem they find."""
