"""The console: a client of the other services in the browser, with no rights but its reader's."""
