"""One outside thing each: SQLite, the dedup service, and a memory that tests are judged against."""
