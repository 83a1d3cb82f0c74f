"""The wire: requests parsed into the words of the core, and reports translated back."""
