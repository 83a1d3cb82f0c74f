"""The adapters behind the filter service's ports."""
