"""What placement stands on: one outside thing each."""
