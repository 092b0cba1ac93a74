"""What every room may import: plain values, errors, messages, and what this machine offers.

Nothing here knows how a model runs, and nothing here imports another room or the C library. Code
belongs here when two rooms on different sides of a process border need the same number or type.

    config        settings of the engine, checked when they are made
    limits        limits and defaults that several rooms share
    errors        the exceptions of the engine and their codes
    messages      the protocol between front end and worker
    native_types  structs of cflow.h as Python values
    model_header  the header of a model file, as it crosses between processes
    metadata      the checked metadata of a model file
    machine       cores, memory, huge pages and disk space of this machine
    cgroup        limits that control groups set
    cache_folder  where files that can be made again are kept
    reports       callbacks that show progress
"""
