"""What the commands print: text, or one JSON object."""
