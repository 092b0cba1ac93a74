"""Translates between the APIs of OpenAI and Anthropic and the engine. It knows nothing of connections.

A request, in this order: `schemas` (the bodies), `prompts` (text or messages to token ids),
`constraints` (a grammar for the answer), `tools` (which calls are allowed), `parameters` (sampling),
`admission` (whether the engine can take it). An answer: `generation` (its deltas as one stream, with
`records` of its times), `choices` with `logprobs` (completions), `replies` (chats), and `wire` (ids,
usage, chunks). `responses` (/v1/responses, with `stored` for those that are kept) and `messages`
(/v1/messages) turn their requests into chats and replies into their items. `embeddings` writes vectors.

May import `server.{config,errors,metrics}` and `engine.{base,text,client}`.
"""
