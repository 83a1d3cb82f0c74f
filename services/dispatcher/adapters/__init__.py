"""What the dispatcher stands on."""
