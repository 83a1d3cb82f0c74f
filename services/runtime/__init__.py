"""What every process stands on: settings, server, interceptors, status, channels, health, logs."""
