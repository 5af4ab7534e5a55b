"""The verbs as commands: flags in, text out. What a verb needs is imported when it runs."""
