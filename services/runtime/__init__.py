"""Machinery shared by all services: settings, server, interceptors, access, statuses, channels,
health, metrics, logs."""
