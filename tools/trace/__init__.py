"""A receiver of spans and metrics in this process, and a message's trace as a tree."""
