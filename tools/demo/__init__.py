"""A year of flights through crashes, and the proof that each is stored once.

The demo runs the services of tools.stack and these parts, in the order of a message's path:

    dataset       flights and weather of 2013, as messages
    publisher     a process that publishes, crashes and resends
    relay         between publisher and ledger, for the weather: stops within large messages
    proof         Spark jobs restore the deduplication state from the log, and audit the log; log,
                  receipts and deduplication state are compared with the data set
    crew          a process that consumes flights, in order for each aircraft
    filtering     a subscription that gets the flights of one airport

`__main__` is the whole demo in one function. `publishing` and `delivery` run the publishers and the
crews while processes are killed. `journey` traces one message. `report` has the promises, and
prints which were kept.
"""
