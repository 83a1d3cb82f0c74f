"""What the filter service's ports are made of."""
