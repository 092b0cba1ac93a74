"""Engines as the server sees them.

The server talks to the `Engine` interface and does not know where a model runs. A model can crash
or hang, so the front end neither opens a model file nor calls the C library. One process reads the
header; a worker process runs the model, and is restarted if it dies. Imports: text, base.

    engine          the interface: requests, answers, states
    local           an engine in a worker process of this machine
    worker_process  the process and the front end's end of its socket
    watchdog        tells a slow worker from a hung one
    answer          an iterator over what the worker sends for one prompt
    totals          counters that survive a restart of the worker
    card            what is known of a model before it is loaded
"""
