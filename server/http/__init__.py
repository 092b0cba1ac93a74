"""What speaks HTTP, from the connection to the route.

A request passes, in this order: `protocol` (HTTP/1.1 with limits), `http_metrics` (count, time, id),
`linger` (answers sent before the body was read), `sub_path` (a prefix that a proxy has removed), CORS,
`auth` (API keys), `tracing`, a file of `routes`, and there `body` (bounded JSON). A route asks `service`, which holds what all routes share.
`sse` sends event streams; `web/` is the page at /, `openapi` completes /openapi.json, `tls` loads
certificates, `listen` opens the sockets, `healthcheck` is what a container runs.

May import `server.api`, `server.{config,errors,metrics}` and `engine.{base,text,client}`.
"""
