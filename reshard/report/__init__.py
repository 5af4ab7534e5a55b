"""What the verbs print: tables for people, one JSON object for programs."""
