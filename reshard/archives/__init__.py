"""Archives that torch.save wrote, read without torch and without running anything in their pickles."""
