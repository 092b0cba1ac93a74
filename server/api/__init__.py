"""What translates between the OpenAI API and the engine; it knows nothing of connections.

A request, in this order: `schemas` (the bodies), `prompts` (text or messages to token ids),
`constraints` (a grammar for the answer), `tools` (which calls are allowed), `parameters` (sampling),
`admission` (whether the engine can take it). An answer: `generation` (its deltas as one stream, with
`records` of its times), `choices` with `logprobs` (completions), `replies` (chats), `responses`
(/v1/responses), and `wire` (ids, usage, chunks).

May import `server.{config,errors,metrics}` and `engine.{base,text,client}`.
"""
