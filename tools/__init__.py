"""Programs that run from a checkout only, and are not published: stack, demo, bench, torture,
dev."""
