"""The front end and the `cflow` command.

http      what speaks HTTP: connection, keys, bodies, routes, event streams, the page
api       what translates: OpenAI requests to prompts and sampling parameters, deltas to answers
commands  what runs `cflow COMMAND`, one file a group

Beside them: `config` (settings of `cflow serve`), `errors` (the one error shape), `metrics`.
The server reaches the engine through the `Engine` interface of `cflow.engine.client` only;
commands that work on files or measure call `cflow.engine.files` and `cflow.engine.measure`.
"""
