"""The public functions: what `import reshard` offers, and what the commands call.

`reshard pack` alone calls the operation below its function; docs/adr/0021 says why.
"""
