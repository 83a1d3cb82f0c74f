"""The whole of Seqgate in one process on virtual time: every service from its servicer to its
store, and the real client, among faults.

    swarm.py           what a history has: drawn from its seed
    mixes.py           named ways to use and disturb it, for what seldom meets by chance
    world.py           one history's world: network, stores, services, applications, what was seen
    stores.py          what outlives processes, and how it fails
    services.py        each service as a process, by the wiring of its own app
    workload.py        producers, consumers, readers
    administrators.py  those who move, filter, delete, trim and explain
    faults.py          what goes wrong, and when
    seen.py            all that happened, as somebody saw it who sees everything
    checkers/          what must hold of it
    budgets.py         what services hold, held against their limits
    history.py         one history from beginning to end

`python -m tests.simulation.system --help` runs many.
"""
