from tests.frontend.conftest import api, shared_servers, start_server

__all__ = ["api", "shared_servers", "start_server"]
