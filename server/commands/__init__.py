"""What runs `cflow COMMAND`.

`cli` lists the commands. Their flags are in `cli` (serve), `talk` (run, chat), `batch`, `files` (convert, inspect,
plan, synth), `measure` (bench, perplexity, doctor) and `lab`; `serve` runs the server, `conversation`
what `talk` starts, `batch_file` what `batch` does. They share `options` (the engine's flags), `models` (from a reference to a model
file), `startup` (waiting for an engine), `progress` and `output`.

A command imports what it runs inside its function, so that `--help` and errors stay fast. May import
the rooms of the server, `engine.{base,text,client,files,measure}`, and, in `lab` only, `engine.lab`.
"""
