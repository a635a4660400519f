"""Every message that crosses a process boundary, as msgspec structs and nothing else.

One module per direction: :mod:`requests` (API process -> engine), :mod:`outputs` (engine -> API
process), :mod:`control` (operators, through the API process, to the engine loop) and :mod:`steps`
(engine <-> worker). Messages are data: no logic lives here beyond packing token ids.
"""
