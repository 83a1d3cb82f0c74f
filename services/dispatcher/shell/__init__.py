"""The shell of a subscription: streams in and out, and what carries out its decisions."""
