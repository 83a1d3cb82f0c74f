"""All of Seqgate in one process and in virtual time: every service from servicer to store, and the
real client, under faults.

    swarm.py           the settings of a history, drawn from its seed
    mixes.py           named combinations of settings that seldom meet by chance
    world.py           one history's network, stores, services and applications
    stores.py          the state that outlives processes, and its failures
    services.py        each service as a process, wired by its own app
    workload.py        producers, consumers, readers
    administrators.py  moves, filters, deletions, trims, explanations
    faults.py          faults and their times
    seen.py            the record of a history, with full knowledge
    checkers/          the invariants
    budgets.py         memory and concurrency of services, against their limits
    history.py         one history from start to end

`python -m tests.simulation.system --help` runs many.
"""
