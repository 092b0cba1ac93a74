"""What runs `cflow COMMAND`.

`cli` lists the commands; their code is in `serve`, `talk` (run, chat), `files` (convert, inspect, plan, synth),
`measure` (bench, perplexity, doctor) and `lab`. They share `options` (flags), `models` (from a
reference to a model file), `progress` and `output`.

A command imports what it runs inside its function, so that `--help` and errors stay fast. May import
the rooms of the server, `engine.{base,text,client,files,measure}`, and, in `lab` only, `engine.lab`.
"""
