"""The dispatcher service: delivers the messages of a topic to the consumers of its subscriptions.

The path of a delivery, by folder:

    wire       a request is parsed (servicer.py calls this, and service.py)
    shell      live: a subscription; session: a consumer's stream
    core       the machine decides: an event in, effects out
    shell      performing: effects become calls; sending: deliveries get their entries
    filtering  verdicts on the entries that were read
    letters    entries that failed too often go to the dead letter topic
    cursor     the subscription's durable state
    adapters   the log, cursors, filters and dead letter topics over gRPC
"""
