"""The public functions: what `import reshard` offers, and what the commands call."""
