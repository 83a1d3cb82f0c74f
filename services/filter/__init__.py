"""The filter service: which entries a subscription wants, decided from their metadata."""
