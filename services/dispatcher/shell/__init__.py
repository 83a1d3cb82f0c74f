"""The shell of a subscription: streams in and out, and the execution of its decisions."""
