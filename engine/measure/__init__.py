"""Measuring a model and a machine, without a server.

What is measured runs with the settings and the memory budget of a server, but without a scheduler,
so that nothing but the model is timed. Imports: files, memory, text, native, base.

    bare        a model and one context, opened as a server opens them
    bench       speed of prefill and decode beside the memory bandwidth
    perplexity  how well a model predicts a text
    plan        memory and speed predicted from a model's header
    disk_probe  speed of random reads from a model file
    doctor      what this machine offers, and what slows it down
"""
