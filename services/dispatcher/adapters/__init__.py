"""The adapters behind the dispatcher's ports."""
