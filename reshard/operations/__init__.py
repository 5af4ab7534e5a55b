"""What the commands do: resolve, pack, export, verify, diff, and packing in parts."""
