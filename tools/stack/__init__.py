"""All services on one machine, with embedded defaults."""
