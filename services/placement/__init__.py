"""Which instance of a service holds a topic: shared by the services that keep topics."""
