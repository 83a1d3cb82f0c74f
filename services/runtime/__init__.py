"""What every process stands on: settings, server, interceptors, rights, status, channels, health,
logs."""
