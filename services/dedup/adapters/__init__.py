"""One outside thing each: Redis, and a memory that tests are judged against."""
