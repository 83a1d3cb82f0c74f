"""A receiver of spans and metrics in this process, and a message's journey as a tree."""
