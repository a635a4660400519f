"""How messages travel between processes. Nothing here knows what a message means.

| module | what it owns |
|---|---|
| ``runtime_dir`` | the instance's private directory on tmpfs: rings, signals, sockets; removal of dead ones |
| ``ring`` | one writer, many readers, variable-length messages in shared memory, no lock |
| ``bell`` | waking another process (or thread): a datagram to a bound Unix socket |
| ``spin`` | looking again for a moment before going to sleep |
| ``worker_link`` | the rings, bells and signals between an engine and its worker ranks |
| ``signals`` | named integers in shared memory: readiness, progress, liveness |
| ``channels`` | ZMQ sockets between API processes and the engine |
| ``process`` | dying with the parent, signals as events, process handles |
"""
