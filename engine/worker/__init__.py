"""The process that runs a model: `python -m cflow.engine.worker FD`.

A model can crash, hang or exhaust memory, so it runs in a process of its own, which the front end
watches and replaces. The worker takes requests from a socket and returns text; it never sees HTTP.
Each step of its loop takes messages, chooses rows, runs them, samples, and sends one message back.
Imports: text, memory, native, base.

    worker      the loop, and the state of all requests
    link        its end of the socket
    loading     from settings to a model that has generated a token
    read_header the header of a model file: a process of its own, for the front end
    scheduler   which rows the next step computes
    waiting     the queue, fair between API keys
    pace        predicts step time, to limit prefill rows
    batch       a step's input and result
    sequence    a request and its choices
    runner      a batch as calls of the C library
    drafts      guesses at coming tokens, and how many to check
    constraint  grammars: which tokens may come next
    transcript  tokens of a choice as text
    stops       stop strings in that text
    stats       counters for the front end
"""
