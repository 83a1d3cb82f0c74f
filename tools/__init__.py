"""Programs that run from a checkout and are not published: stack, demo, bench, torture, dev."""
